"""Requests on their way to replicas that come and go, and what is known of each place for a replica.

A replica says once, when it is ready, where it publishes its KV events and which disk directory it has taken
over (`ReplicaPlace`, through Serve's `record_replica_metadata`). A replica with the directory of an earlier
one gets that one's number: what lay on its disk is still known, and prefixes keep their home.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from stemma_router.cluster.routers import Placement, Placements, RoutedRequest
from stemma_router.events.follower import EventFollower


class CallRouter(Protocol):
    """The part of a router that the `RoutedCall`s it placed need (`serve_router.py`)."""

    placements: Placements

    def begin(self, ask: RoutedRequest, replica: Hashable) -> Placement | None:
        """Note that a request goes to a replica; None if that has ended."""

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` on the router's loop. From any thread."""

    def names(self) -> tuple[str, ...]:
        """Return the names of the replicas that run. From any thread."""

    def describe(self) -> dict[str, Any]:
        """Return what is known of each replica. From any thread."""


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """A replica's account of itself, for the routers."""

    events: str | None
    """ZMQ address of its KV events; None: it publishes none."""
    replay: str | None
    disk: str | None
    """The node and the directory of its disk tier; None: it has none."""
    pid: int
    """The number of its process, for the operator."""

    def as_dict(self) -> dict[str, str | int | None]:
        """Return the form that Ray Serve carries."""
        return asdict(self)

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> ReplicaPlace:
        """Read that form."""
        return cls(
            metadata.get("events"), metadata.get("replay"), metadata.get("disk"), metadata.get("pid", 0)
        )


@dataclass(frozen=True, slots=True)
class ReplicaCall:
    """A request as a replica gets it."""

    method: str
    path: str
    """With the query."""
    headers: tuple[tuple[bytes, bytes], ...]
    content: bytes


@dataclass(eq=False)
class RoutedCall:
    """A request on its way: in the sender's process this, in the replica's a `ReplicaCall`."""

    call: ReplicaCall = ReplicaCall("GET", "/", (), b"")
    ask: RoutedRequest | None = None
    """The prompt; None: the request has none."""
    avoid: Hashable | None = None
    """The replica that failed on it before."""
    only: str | None = None
    """The name of the one replica that is meant; see `CallRouter.names`."""
    replica: Hashable | None = None
    """Where it was sent."""
    num_tokens: int = 0
    """Prompt tokens that the replica has to compute until the first byte, as far as this router knows."""
    _router: CallRouter | None = None
    _placement: Placement | None = None
    _is_over: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaCall, (self.call.method, self.call.path, self.call.headers, self.call.content)

    @property
    def router(self) -> CallRouter | None:
        """Where it was placed; None: nowhere yet, or by a router of Ray's own."""
        return self._router

    @property
    def name(self) -> str:
        """The name of the replica that it was sent to; empty: none yet, or of a router of Ray's own."""
        return "" if self._router is None else str(getattr(self.replica, "unique_id", ""))

    @property
    def can_move(self) -> bool:
        """Whether there is another replica."""
        return self._router is not None and len(self._router.names()) > 1

    def note_first_token(self) -> None:
        """The answer begins. From any thread."""
        if self._router is not None:
            self._router.post(self._first_token)

    def end(self) -> None:
        """The answer has ended, or never comes. From any thread."""
        self._is_over = True
        if self._router is not None:
            self._router.post(self._unplace)

    def place(self, router: CallRouter, replica: Hashable) -> None:
        """It goes to this replica, and not to the one of an earlier call. On the router's loop."""
        self._unplace()
        self._router, self.replica = router, replica
        if not self._is_over and self.ask is not None:
            self._placement = placement = router.begin(self.ask, replica)
            load = None if placement is None else router.placements.loads[placement.replica]
            self.num_tokens = self.ask.num_tokens if load is None else load.num_tokens

    def _first_token(self) -> None:
        if self._router is not None and self._placement is not None:
            self._router.placements.note_first_token(self._placement)

    def _unplace(self) -> None:
        placement, self._placement = self._placement, None
        if self._router is not None and placement is not None:
            self._router.placements.end(placement)


@dataclass(slots=True)
class Home:
    """A number, and what is known of the replicas that have had it."""

    number: int
    follower: EventFollower
    place: ReplicaPlace
    replica: Hashable | None = None
    following: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Homes:
    """Numbers of replicas; one that ends leaves its number to its successor."""

    placements: Placements
    all: list[Home] = field(default_factory=list)

    def of(self, replica: Hashable) -> Home | None:
        """Return the home of a replica."""
        return next((home for home in self.all if home.replica == replica), None)

    def take(self, replica: Hashable, place: ReplicaPlace) -> tuple[Home, bool]:
        """Return a home for a new replica, and whether it takes over the disk tier known there."""
        free = [home for home in self.all if home.replica is None]
        same = next((home for home in free if place.disk is not None and home.place.disk == place.disk), None)
        home = same or next(iter(free), None)
        if home is None:
            number = self.placements.add_replica()
            home = Home(number, EventFollower(number, self.placements.holdings), place)
            self.all.append(home)
        elif same is None:
            home.follower.clear()
        home.replica, home.place = replica, place
        return home, same is not None
