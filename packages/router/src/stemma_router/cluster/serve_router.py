"""Ray Serve's request router that goes by what the replicas hold: `routers.py`, fed by their KV events.

Ray Serve makes one for each process that sends requests to the replicas, and runs it on an event loop of its
own. What requests need of it is posted to that loop, so nothing here is locked. Serve copies this module by
value into those processes: whatever others must recognize is in `replica_calls.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from stemma_router.cluster.replica_calls import Home, Homes, ReplicaPlace, RoutedCall
from stemma_router.cluster.routers import ROUTERS, Placement, Placements, RoutedRequest
from stemma_router.events.follower import EventFollower
from stemma_router.events.subscriber import Subscription

_log = logging.getLogger(__name__)


class KVEventRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Orders replicas by a router of `ROUTERS`. See the module."""

    def initialize_state(self, *, router: str) -> None:
        """Called by Ray Serve with `request_router_kwargs`: the name of the router."""
        self.placements = Placements(ROUTERS[router](), 0)
        self._homes = Homes(self.placements)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve with all replicas that run, whenever they change."""
        super().update_replicas(replicas)
        running = {replica.replica_id for replica in replicas}
        for home in self._homes.all:
            if home.replica is not None and home.replica not in running:
                self._leave(home)
        for replica in replicas:
            if self._homes.of(replica.replica_id) is None:
                place = ReplicaPlace.of(replica.replica_metadata)
                home, is_restart = self._homes.take(replica.replica_id, place)
                if place.events is not None:
                    subscription = Subscription(
                        home.follower, place.events, place.replay, is_restart=is_restart
                    )
                    home.following = self._event_loop.create_task(self._follow(subscription, home.follower))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray Serve when a request found a replica dead."""
        super().on_replica_actor_died(replica_id)
        home = self._homes.of(replica_id)
        if home is not None:
            self._leave(home)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates, best first, each as a rank of its own."""
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(call, RoutedCall):
            return [candidate_replicas]
        if call.only is not None:
            named = [one for one in candidate_replicas if one.replica_id.unique_id == call.only]
            if named:
                call.place(self, named[0].replica_id)
            return [named or candidate_replicas]
        homes = [(self._homes.of(replica.replica_id), replica) for replica in candidate_replicas]
        by_number = {home.number: replica for home, replica in homes if home is not None}
        if not by_number:
            return [candidate_replicas]
        order = self.placements.order(call.ask or RoutedRequest((), 1, 1), tuple(by_number))
        best_first = [by_number[number] for number in order]
        best_first.sort(key=lambda replica: replica.replica_id == call.avoid)  # keeps the order of the others
        call.place(self, best_first[0].replica_id)
        return [[replica] for replica in best_first]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray Serve when a replica has taken a request: another one, if the best had no room."""
        call = pending_request.args[0] if pending_request.args else None
        if isinstance(call, RoutedCall) and call.replica != replica_id:
            call.place(self, replica_id)

    def begin(self, ask: RoutedRequest, replica: ReplicaID) -> Placement | None:
        """Note that a request goes to a replica; None if that has ended."""
        home = self._homes.of(replica)
        return None if home is None else self.placements.begin(ask, home.number)

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` on the router's loop. From any thread."""
        self._event_loop.call_soon_threadsafe(work)

    def names(self) -> tuple[str, ...]:
        """Return the names of the replicas that run. From any thread."""
        running = [home.replica for home in tuple(self._homes.all) if home.replica is not None]
        return tuple(getattr(replica, "unique_id", "") for replica in running)

    def describe(self) -> dict[str, Any]:
        """Return what is known of each replica. From any thread: it reads single numbers."""
        return {
            "num_known_blocks": self.placements.holdings.num_ids,
            "replicas": {
                getattr(home.replica, "unique_id", ""): {
                    "requests": self.placements.loads[home.number].num_requests,
                    "tokens_to_compute": self.placements.loads[home.number].num_tokens,
                    "answers": self.placements.loads[home.number].num_running,
                    "pid": home.place.pid,
                    "disk": home.place.disk,
                }
                for home in tuple(self._homes.all)
                if home.replica is not None
            },
        }

    def _leave(self, home: Home) -> None:
        home.replica = None
        if home.following is not None:
            home.following.cancel()
            home.following = None
        if home.place.disk is None:
            home.follower.clear()
        else:
            home.follower.restart()

    @staticmethod
    async def _follow(subscription: Subscription, follower: EventFollower) -> None:
        try:
            await subscription.run()
        except Exception:  # noqa: BLE001 - logged with its traceback
            follower.clear()
            _log.exception("the KV events of a replica aren't followed any more")
