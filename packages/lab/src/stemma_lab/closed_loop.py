"""Should sessions wait until their working sets fit the cache? A closed loop of sessions before one server.

A session's next request comes its recorded gap after its answer before has ended, so a server that is slow
gets its load later. The server computes prompts one after the other (`savings.PrefillModel` of what isn't
cached); answers then come at a fixed speed, side by side. As in `replay`, nothing is pinned while it runs.
Whenever the server is free, the order picks among the requests that wait:

* `fcfs`, `longest-prefix`, `ageing`: as in `order.py`;
* `resident`: sessions whose working sets fit the cache together have places and are served; the others wait.
  While none of the former asks, the server idles at most as long as the cheapest of the others would take to
  compute (rent or buy: never more than twice the best); then that one takes the places of those that are away
  the longest. Who has waited for `bound_s` is served in turn, in `overdue_share` of the server's time: so
  nobody waits longer than `bound_s` and the computing of those before it, divided by that share.

Measured (`hazard`): under overload agents' sessions compute half as much and the median turn falls by nine
tenths, but p99 doubles, since a session's waits become one long one; below overload and on chat it gains
nothing. So the engine has no such order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stemma.engine.core.ordering import MAX_MATCHED, order_fcfs, order_longest_prefix
from stemma.errors import ConfigError
from stemma_lab.replay import TraceCache, replay
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Int64, Trace

LOOP_ORDERS = ("fcfs", "longest-prefix", "ageing", "resident")
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LoopServer:
    """The simulated server."""

    capacity_blocks: int
    policy: str
    prefill: PrefillModel
    decode_s: float = 0.02
    """Seconds from one token of an answer to the next."""
    ageing_s: float = 5.0
    hold_s: float = 30.0
    """A session that hasn't come back for so long gives up its place."""
    bound_s: float = 60.0
    overdue_share: float = 0.25
    """See `resident`."""


@dataclass(frozen=True, slots=True)
class LoopResult:
    """What the sessions saw under one order."""

    order: str
    prefill_tokens: int
    """Tokens that were computed."""
    turn_s: Float64
    """From a request's arrival to its answer's end, shape [num_requests]."""
    slowdowns: Float64
    """Of each session: its turns' time by what it would be alone with an unlimited cache."""
    ended_s: float
    """When the last answer ended."""

    def as_dict(self) -> dict[str, str | float]:
        """Return the JSON form."""
        return {
            "order": self.order,
            "prefill_tokens": self.prefill_tokens,
            "turn_mean_s": float(self.turn_s.mean()),
            "turn_p50_s": float(np.quantile(self.turn_s, 0.5)),
            "turn_p99_s": float(np.quantile(self.turn_s, 0.99)),
            "slowdown_p50": float(np.quantile(self.slowdowns, 0.5)),
            "slowdown_worst": float(self.slowdowns.max()),
            "ended_s": self.ended_s,
        }


@dataclass(frozen=True, slots=True)
class Loop:
    """A trace as sessions: who comes after whom, and when."""

    trace: Trace
    sessions: Int64
    """Of each request."""
    following: Int64
    """The session's next request; -1: none."""
    gaps_s: Float64
    """From the end of the session's answer before; the arrival of a session's first."""
    alone_s: Float64
    """What each request takes alone, with an unlimited cache."""


class WaitingTurn:
    """A request that waits, in the shape that `engine/core/ordering.py` sorts."""

    __slots__ = ("age", "arrival", "num_blocks", "request", "session", "was_preempted")

    def __init__(self, loop: Loop, request: int, arrival: float) -> None:
        self.request = request
        self.session = loop.sessions.item(request)
        self.num_blocks = loop.trace.num_prompt_blocks.item(request)
        self.arrival = arrival
        self.age = (round(arrival * 1e6), request)
        self.was_preempted = False


@dataclass(slots=True)
class _Place:
    """A session whose working set counts."""

    num_blocks: int
    since_s: float
    busy_until_s: float = math.inf
    """End of its latest answer; infinite while it has a request that waits."""


@dataclass(slots=True)
class ResidentSessions:
    """Which sessions may be served now: those whose working sets fit `capacity_blocks` together."""

    capacity_blocks: int
    hold_s: float
    bound_s: float
    cost_s: Callable[[WaitingTurn], float]
    """Seconds to compute what isn't cached of a request."""
    overdue_share: float
    """Of the server's time, for those that waited longer than `bound_s`."""
    _overdue_from_s: float = 0.0
    _idle_since_s: float | None = None
    """Since when nobody with a place asks, while others wait."""
    _places: dict[int, _Place] = field(default_factory=dict)

    def choose_from(self, waiting: Iterable[WaitingTurn], now: float) -> list[WaitingTurn]:
        """Return the requests that may be served, after giving places to those that fit."""
        turns = order_fcfs(waiting)
        self._give_places(turns, now)
        overdue = self._overdue(turns, now)
        chosen = [turn for turn in turns if turn.session in self._places] if overdue is None else [overdue]
        if not chosen and turns:
            chosen = self._bought(turns, now)
        else:
            self._idle_since_s = None
        return chosen

    def _give_places(self, turns: list[WaitingTurn], now: float) -> None:
        for turn in turns:
            if turn.session in self._places:
                self._places[turn.session].busy_until_s = math.inf
        for session, place in list(self._places.items()):
            if place.busy_until_s + self.hold_s <= now:
                del self._places[session]
        for turn in turns:
            if turn.session not in self._places and self._fits(turn):
                self._places[turn.session] = _Place(turn.num_blocks, now)

    def _overdue(self, turns: list[WaitingTurn], now: float) -> WaitingTurn | None:
        """Give the oldest without a place one, if it has waited for long and such have had their share."""
        without = next((turn for turn in turns if turn.session not in self._places), None)
        if without is None or now < max(without.arrival + self.bound_s, self._overdue_from_s):
            return None
        self._overdue_from_s = now + self.cost_s(without) / self.overdue_share
        self._take_places(without, now, lambda place: place.since_s)
        return without

    def _bought(self, turns: list[WaitingTurn], now: float) -> list[WaitingTurn]:
        """Give the cheapest a place, if the server has idled for as long as it takes."""
        if self._idle_since_s is None:
            self._idle_since_s = now
        cost_s, cheapest = self._cheapest(turns)
        if now < self._idle_since_s + cost_s:
            return []
        self._idle_since_s = None
        self._take_places(cheapest, now, lambda place: place.busy_until_s)
        return [cheapest]

    def _cheapest(self, turns: list[WaitingTurn]) -> tuple[float, WaitingTurn]:
        costs = [(self.cost_s(turn), turn) for turn in turns[:MAX_MATCHED]]
        return min(costs, key=lambda item: item[0])

    def _take_places(self, turn: WaitingTurn, now: float, rank: Callable[[_Place], float]) -> None:
        """Give a place, and take those of the lowest rank until all fit."""
        for session, _ in sorted(self._places.items(), key=lambda item: rank(item[1])):
            if self._fits(turn):
                break
            del self._places[session]
        self._places[turn.session] = _Place(turn.num_blocks, now)

    def served(self, turn: WaitingTurn, ends_s: float) -> None:
        """Note that a request's answer ends at `ends_s`."""
        place = self._places[turn.session]
        place.num_blocks, place.busy_until_s = turn.num_blocks, ends_s

    def wakes_s(self, waiting: Iterable[WaitingTurn], now: float) -> float:
        """Return when places may be free that aren't now, if nobody comes before."""
        holds = [one.busy_until_s + self.hold_s for one in self._places.values()]
        turns = order_fcfs(waiting)
        bounds = [max(turn.arrival + self.bound_s, self._overdue_from_s) for turn in turns[:1]]
        ends = [] if self._idle_since_s is None else [self._idle_since_s + self._cheapest(turns)[0]]
        return min((at for at in (*holds, *bounds, *ends) if at > now), default=math.inf)

    def _fits(self, turn: WaitingTurn) -> bool:
        used = sum(place.num_blocks for place in self._places.values())
        return not self._places or used + turn.num_blocks <= self.capacity_blocks


def make_loop(trace: Trace, server: LoopServer) -> Loop:
    """Return the trace's sessions; where it tells no gap, arrivals less the time alone give it."""
    sessions = trace.sessions if (trace.sessions >= 0).all() else _sessions_by_prefix(trace)
    hits = replay(trace, "lru", None).hit_tokens(trace)
    alone_s = server.prefill.seconds(hits, trace.input_tokens) + server.decode_s * trace.output_tokens
    following = np.full(trace.num_requests, -1, dtype=np.int64)
    gaps_s = trace.timestamps_s.copy()
    latest: dict[int, int] = {}
    for request, session in enumerate(sessions.tolist()):
        before = latest.get(session)
        if before is not None:
            following[before] = request
            told = trace.gaps_s.item(request)
            apart = float(trace.timestamps_s[request] - trace.timestamps_s[before] - alone_s[before])
            gaps_s[request] = max(0.0, apart) if math.isnan(told) else told
        latest[session] = request
    return Loop(trace, sessions, following, gaps_s, alone_s)


def _sessions_by_prefix(trace: Trace) -> Int64:
    """Return sessions where the trace tells none: one goes on where its last whole block is seen again."""
    session_of: dict[int, int] = {}
    sessions = np.zeros(trace.num_requests, dtype=np.int64)
    for request in range(trace.num_requests):
        chain = trace.blocks_of(request)[: int(trace.num_prompt_blocks[request])].tolist()
        found = next((session_of.pop(block) for block in reversed(chain) if block in session_of), request)
        sessions[request] = found
        if len(chain) > 1:
            session_of[chain[-2]] = found
    return sessions


def run_loop(loop: Loop, order: str, server: LoopServer) -> LoopResult:
    """Serve all sessions in one order. Raises ConfigError for an unknown one."""
    if order not in LOOP_ORDERS:
        raise ConfigError(f"unknown order {order!r}; known: {', '.join(LOOP_ORDERS)}")
    return _Simulation(loop, order, server).run()


class _Simulation:
    def __init__(self, loop: Loop, order: str, server: LoopServer) -> None:
        self._loop, self._order, self._server = loop, order, server
        self._cache = TraceCache(server.policy, server.capacity_blocks)
        self._resident = ResidentSessions(
            server.capacity_blocks, server.hold_s, server.bound_s, self._cost_s, server.overdue_share
        )
        firsts = np.setdiff1d(np.arange(loop.trace.num_requests), loop.following)
        self._coming = [(loop.gaps_s.item(request), request) for request in firsts.tolist()]
        heapq.heapify(self._coming)
        self._waiting: dict[int, WaitingTurn] = {}
        self._turn_s = np.zeros(loop.trace.num_requests)
        self._num_computed = 0
        self._ended_s = 0.0

    def run(self) -> LoopResult:
        now = 0.0
        while self._coming or self._waiting:
            while self._coming and self._coming[0][0] <= now:
                arrival, request = heapq.heappop(self._coming)
                self._waiting[request] = WaitingTurn(self._loop, request, arrival)
            turn = self._choose(now)
            now = self._next_s(now) if turn is None else self._serve(turn, now)
        sessions = np.unique(self._loop.sessions, return_inverse=True)[1]
        slowdowns = np.bincount(sessions, self._turn_s) / np.bincount(sessions, self._loop.alone_s)
        return LoopResult(self._order, self._num_computed, self._turn_s, slowdowns, self._ended_s)

    def _choose(self, now: float) -> WaitingTurn | None:
        turns: list[WaitingTurn] = list(self._waiting.values())
        if self._order == "resident":
            turns = self._resident.choose_from(turns, now)
        if not turns or self._order == "fcfs":
            return order_fcfs(turns)[0] if turns else None
        patience_s = math.inf if self._order == "longest-prefix" else self._server.ageing_s
        return order_longest_prefix(turns, self._num_cached, patience_s)[0]

    def _num_cached(self, turn: WaitingTurn) -> int:
        return self._cache.num_cached(self._loop.trace.blocks_of(turn.request))

    def _cost_s(self, turn: WaitingTurn) -> float:
        trace = self._loop.trace
        length = trace.input_tokens.item(turn.request)
        return float(
            self._server.prefill.seconds(min(self._num_cached(turn) * trace.block_size, length), length)
        )

    def _next_s(self, now: float) -> float:
        """Return when something may change while nobody can be served."""
        comes = self._coming[0][0] if self._coming else math.inf
        return min(comes, self._resident.wakes_s(self._waiting.values(), now))

    def _serve(self, turn: WaitingTurn, now: float) -> float:
        """Compute a prompt; return when the server is free."""
        loop, request = self._loop, turn.request
        trace = loop.trace
        conclusion, session = trace.conclusion_of(request), turn.session + 1
        num_hit = min(self._cache.serve(trace.blocks_of(request), now, conclusion, session), turn.num_blocks)
        length = trace.input_tokens.item(request)
        cached = min(num_hit * trace.block_size, max(0, length - 1))
        free_s = now + float(self._server.prefill.seconds(cached, length))
        ends_s = free_s + self._server.decode_s * trace.output_tokens.item(request)
        self._num_computed += length - cached
        self._turn_s[request] = ends_s - turn.arrival
        self._ended_s = max(self._ended_s, ends_s)
        del self._waiting[request]
        if self._order == "resident":
            self._resident.served(turn, ends_s)
        following = loop.following.item(request)
        if following >= 0:
            heapq.heappush(self._coming, (ends_s + loop.gaps_s.item(following), following))
        return free_s
