"""Follows the KV events of a fleet's servers, as these come and go."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from stemma.errors import ConfigError
from stemma_router.cluster.fleet import Fleet
from stemma_router.cluster.holdings_writer import HoldingsWriter
from stemma_router.routing.server_list import FleetServer

if TYPE_CHECKING:  # ZMQ is an extra
    from stemma_router.events.follower import EventFollower
    from stemma_router.events.subscriber import Subscription

_log = logging.getLogger(__name__)
COUNTERS = ("events", "unplaced", "gaps", "lost", "snapshots", "malformed", "aged")

_WRONG: dict[tuple[str, Any], str] = {
    ("state", "unreachable"): "its KV events can't be had: is the events address right?",
    ("replay_answers", False): "its replay address doesn't answer: what it holds already isn't known",
}


class Following:
    """One task for each server with events. For one event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._writer = HoldingsWriter()
        self._tasks: dict[FleetServer, asyncio.Task[None]] = {}
        self._followed: dict[FleetServer, tuple[EventFollower, Subscription]] = {}
        self._left: Counter[str] = Counter()
        """Counters of servers that are gone."""

    @property
    def block_size(self) -> int | None:
        """Tokens of a block, as the first server says that has told; None: none has."""
        sizes = (follower.block_size for follower, _ in self._followed.values())
        return next((size for size in sizes if size is not None), None)

    def block_sizes(self) -> Iterator[tuple[int, int]]:
        """Yield the place of each server that has told it, and its tokens of a block."""
        for server, (follower, _) in self._followed.items():
            member = self._fleet.member(server.url)
            if member is not None and follower.block_size is not None:
                yield member.place, follower.block_size

    @property
    def roots(self) -> frozenset[int]:
        """Roots of adapters' blocks, as servers name them in events."""
        return frozenset().union(*(follower.roots for follower, _ in self._followed.values()))

    def counters(self) -> Counter[str]:
        """Return what happened to events since the start, by `COUNTERS`."""
        total = Counter(self._left)
        for follower, subscription in self._followed.values():
            total += _counters(follower, subscription)
        return total

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return how each server is followed, by URL."""
        now = asyncio.get_running_loop().time()
        return {
            server.url: {
                "state": "following" if subscription.is_connected else "unreachable",
                "last_event_s": None if subscription.heard_at is None else now - subscription.heard_at,
                "replay_answers": subscription.replay_answers,
                "block_size": follower.block_size,
            }
            for server, (follower, subscription) in self._followed.items()
        }

    def warnings(self) -> list[str]:
        """Return what is wrong with addresses and events, a sentence each."""
        found = []
        for state, text in _WRONG.items():
            urls = [url for url, one in self.describe().items() if one[state[0]] == state[1]]
            found += [f"{url}: {text}" for url in urls]
        sizes = {size for _, size in self.block_sizes()}
        if len(sizes) > 1:
            found.append(f"servers have blocks of {' and '.join(map(str, sorted(sizes)))} tokens")
        by_address: dict[str | None, list[str]] = {}
        for server in self._followed:
            by_address.setdefault(server.events, []).append(server.url)
        for urls in by_address.values():
            if len(urls) > 1:
                found.append(f"{', '.join(urls)}: one events address for several servers")
        return found

    def follow(self, servers: Iterable[FleetServer]) -> None:
        """Follow these servers, and no others. Raises ConfigError without ZMQ."""
        wanted = [server for server in servers if server.events is not None]
        if wanted and find_spec("zmq") is None:
            raise ConfigError("KV events need ZMQ: pip install stemma-router")
        for server in [server for server in self._tasks if server not in wanted]:
            self._tasks.pop(server).cancel()
            self._left += _counters(*self._followed.pop(server))
        for server in wanted:
            if server not in self._tasks:
                self._tasks[server] = asyncio.create_task(self._follow_one(server))

    async def close(self) -> None:
        """Follow nobody any more."""
        tasks = list(self._tasks.values())
        self.follow(())
        await asyncio.gather(*tasks, return_exceptions=True)
        self._writer.close()

    async def _follow_one(self, server: FleetServer) -> None:
        from stemma_router.events.follower import EventFollower
        from stemma_router.events.subscriber import Subscription

        member = self._fleet.member(server.url)
        assert member is not None, "a server of the fleet"
        assert server.events is not None, "one with events"
        follower = EventFollower(member.place, self._fleet.placements.holdings)
        subscription = Subscription(follower, server.events, server.replay, apply=self._writer.apply)
        self._followed[server] = follower, subscription
        try:
            await subscription.run()
        except Exception:  # noqa: BLE001 - logged with its traceback
            await self._writer.apply(follower.clear)
            _log.exception("%s: its KV events aren't followed any more", server.url)


def _counters(follower: EventFollower, subscription: Subscription) -> Counter[str]:
    return Counter(
        events=follower.num_events,
        unplaced=follower.num_unplaced,
        gaps=subscription.num_gaps,
        lost=subscription.num_lost,
        snapshots=subscription.num_snapshots,
        malformed=subscription.num_malformed,
        aged=subscription.num_aged,
    )
