"""The router of a simulated fleet: the proxy's fleet, index and followers, with an account of their time.

What a proxy does beside them isn't here: HTTP, tokenizing, and the decoding of event messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from stemma.told import NOTHING, Told
from stemma_lab.fleet.caches import CacheChange
from stemma_lab.fleet.servers import SimulatedServer
from stemma_lab.fleet.traffic import names_of
from stemma_router.cluster.fleet import Fleet, Try
from stemma_router.cluster.health import Check
from stemma_router.cluster.holdings import Holdings
from stemma_router.cluster.member import FleetMember, Outcome
from stemma_router.cluster.routers import ROUTERS, RoutedRequest
from stemma_router.events.follower import EventFollower
from stemma_router.kv_events.schema import AllBlocksCleared, BlocksHeld

_PART = 65_536
"""Blocks of a message of a snapshot."""


@dataclass(slots=True)
class Cpu:
    """Seconds of this process that a router's work took, and how much that was."""

    decisions_s: float = 0.0
    checks_s: float = 0.0
    events_s: float = 0.0
    snapshots_s: float = 0.0
    num_decisions: int = 0
    """Tries."""
    num_event_blocks: int = 0
    num_snapshot_blocks: int = 0


class AccountedFleet(Fleet):
    """A fleet that counts its time."""

    cpu: Cpu

    @cached_property
    def met(self) -> dict[FleetMember, None]:
        """All servers that got a request, those included that left."""
        return {}

    def order(self, ask: RoutedRequest, without: Iterable[str] = ()) -> list[FleetMember]:
        """As `Fleet.order`."""
        with _counted(self.cpu, "decisions_s"):
            return super().order(ask, without)

    def begin(
        self,
        member: FleetMember,
        ask: RoutedRequest,
        *,
        is_retry: bool,
        is_streamed: bool,
        is_optional: bool = False,
    ) -> Try:
        """As `Fleet.begin`."""
        self.cpu.num_decisions += 1
        with _counted(self.cpu, "decisions_s"):
            return super().begin(
                member, ask, is_retry=is_retry, is_streamed=is_streamed, is_optional=is_optional
            )

    def note_first_byte(self, one: Try) -> None:
        """As `Fleet.note_first_byte`."""
        with _counted(self.cpu, "decisions_s"):
            super().note_first_byte(one)

    def end(self, one: Try, outcome: Outcome, retry_after_s: float) -> int:
        """As `Fleet.end`."""
        self.met[one.member] = None
        with _counted(self.cpu, "decisions_s"):
            return super().end(one, outcome, retry_after_s)

    def note_check(self, url: str, found: Check, told: Told = NOTHING) -> None:
        """As `Fleet.note_check`."""
        with _counted(self.cpu, "checks_s"):
            super().note_check(url, found, told)


@dataclass(slots=True)
class SimulatedRouter:
    """A router from its start on: it knows nothing of a server before that one's snapshot."""

    fleet: AccountedFleet
    _followers: dict[str, EventFollower] = field(default_factory=dict)
    """By URL: servers whose snapshot is here."""

    @classmethod
    def started(
        cls, router: str, urls: Iterable[str], max_blocks: int, cpu: Cpu, clock: Callable[[], float]
    ) -> SimulatedRouter:
        """Return a router that was just started."""
        holdings = Holdings(max_blocks, secret=0)
        fleet = AccountedFleet(ROUTERS[router](), urls, holdings=holdings, clock=clock)
        fleet.cpu = cpu
        return cls(fleet)

    def take_snapshot(self, server: SimulatedServer, block_size: int) -> int:
        """Take what a server holds now; return the number of blocks."""
        member = self.fleet.member(server.url)
        if member is None:
            return 0
        follower = EventFollower(member.place, self.fleet.placements.holdings)
        words = names_of(server.cache.pieces).astype("<u8")
        events: list[AllBlocksCleared | BlocksHeld] = [AllBlocksCleared()]
        for start in range(0, len(words), _PART):
            part = words[start : start + _PART].tobytes()
            events.append(BlocksHeld(part, part, b"\x01" * (len(part) // 8), block_size))
        with _counted(self.fleet.cpu, "snapshots_s"):
            follower.take(events)
        self.fleet.cpu.num_snapshot_blocks += len(words)
        self._followers[server.url] = follower
        return len(words)

    def take_event(self, server: SimulatedServer, change: CacheChange) -> None:
        """Take what changed in a server's cache; before its snapshot it says nothing."""
        member = self.fleet.member(server.url)
        if member is None or server.url not in self._followers:
            return
        stored, evicted = names_of(change.stored), names_of(change.evicted)
        holdings = self.fleet.placements.holdings
        with _counted(self.fleet.cpu, "events_s"):
            if len(stored):
                holdings.store(member.place, stored)
            if len(evicted):
                holdings.remove(member.place, evicted)
        self.fleet.cpu.num_event_blocks += len(stored) + len(evicted)


@contextmanager
def _counted(cpu: Cpu, name: str) -> Iterator[None]:
    begun = time.thread_time()
    try:
        yield
    finally:
        setattr(cpu, name, getattr(cpu, name) + time.thread_time() - begun)
