"""Sessions in a closed loop: the simulator against one that looks at every second, and what places do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from packages.lab.tests.traces import trace_of

from stemma.engine.core.ordering import order_fcfs, order_longest_prefix
from stemma.errors import ConfigError
from stemma_lab.closed_loop import (
    LOOP_ORDERS,
    Loop,
    LoopServer,
    ResidentSessions,
    WaitingTurn,
    make_loop,
    run_loop,
)
from stemma_lab.replay import TraceCache
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Trace

SERVER = LoopServer(
    12,
    "lru",
    PrefillModel(tokens_per_s=4.0, attention_equal_at=float("inf")),  # a block of 4 tokens a second
    decode_s=1.0,
    ageing_s=8.0,
    hold_s=9.0,
    bound_s=25.0,
    overdue_share=0.25,
)


def sessions_trace(seed: int, num_sessions: int = 5, num_turns: int = 6) -> Trace:
    """Return sessions that grow by one or two blocks a turn, gaps in whole seconds."""
    rng = np.random.default_rng(seed)
    chains = {session: [1000 * session + i for i in range(3)] for session in range(1, num_sessions + 1)}
    requests: list[list[int]] = []
    sessions: list[int] = []
    for _ in range(num_turns):
        for session in rng.permutation(list(chains)).tolist():
            chain = chains[session]
            chain += range(chain[-1] + 1, chain[-1] + 1 + int(rng.integers(1, 3)))
            requests.append(list(chain))
            sessions.append(session)
    gaps = rng.integers(1, 8, len(requests)).astype(np.float64)
    return replace(trace_of(requests), sessions=np.asarray(sessions, dtype=np.int64), gaps_s=gaps)


def whole_cost(loop: Loop, cache: TraceCache, turn: WaitingTurn) -> float:
    """Return the seconds to compute a prompt; the last token always is, so whole hits aren't asked for."""
    length = loop.trace.input_tokens.item(turn.request)
    return (length - 4 * cache.num_cached(loop.trace.blocks_of(turn.request))) / 4.0


def second_by_second(loop: Loop, order: str, server: LoopServer) -> list[float]:
    """Return the turns' times by asking the order in every second in which the server is free."""
    trace, cache = loop.trace, TraceCache("lru", server.capacity_blocks)
    resident = ResidentSessions(
        server.capacity_blocks,
        server.hold_s,
        server.bound_s,
        lambda turn: whole_cost(loop, cache, turn),
        server.overdue_share,
    )
    later = set(loop.following.tolist())
    comes = {r: loop.gaps_s.item(r) for r in range(trace.num_requests) if r not in later}
    took = [0.0] * trace.num_requests
    waiting: dict[int, WaitingTurn] = {}
    now = free = 0
    while comes or waiting:
        for request in sorted((r for r, at in comes.items() if at <= now), key=lambda r: (comes[r], r)):
            waiting[request] = WaitingTurn(loop, request, comes.pop(request))
        if now >= free and waiting:
            turns: list[Any] = list(waiting.values())
            if order == "resident":
                turns = resident.choose_from(turns, now)
            patience = float("inf") if order == "longest-prefix" else server.ageing_s
            num_cached = lambda turn: cache.num_cached(trace.blocks_of(turn.request))  # noqa: E731
            ranked = (
                order_fcfs(turns) if order == "fcfs" else order_longest_prefix(turns, num_cached, patience)
            )
            for turn in ranked[:1]:
                chain = trace.blocks_of(turn.request)
                num_hit = cache.serve(chain, now, trace.conclusion_of(turn.request), turn.session + 1)
                assert num_hit < len(chain)
                free = now + len(chain) - num_hit
                ends = free + trace.output_tokens.item(turn.request)
                took[turn.request] = ends - turn.arrival
                del waiting[turn.request]
                if order == "resident":
                    resident.served(turn, ends)
                following = loop.following.item(turn.request)
                if following >= 0:
                    comes[following] = ends + loop.gaps_s.item(following)
        now += 1
    return took


@pytest.mark.parametrize("order", LOOP_ORDERS)
@pytest.mark.parametrize("seed", range(12))
def test_events_tell_what_every_second_does(order: str, seed: int) -> None:
    loop = make_loop(sessions_trace(seed), SERVER)
    assert run_loop(loop, order, SERVER).turn_s.tolist() == second_by_second(loop, order, SERVER)


def test_sessions_that_fit_together_compute_less_than_all_at_once() -> None:
    loop = make_loop(sessions_trace(1, num_sessions=6, num_turns=12), SERVER)
    server = replace(SERVER, capacity_blocks=36, bound_s=500.0)
    all_at_once, resident = (run_loop(loop, order, server) for order in ("fcfs", "resident"))
    assert resident.prefill_tokens < 0.95 * all_at_once.prefill_tokens
    assert resident.slowdowns.max() < all_at_once.slowdowns.max()


def test_with_room_for_all_nobody_waits_for_a_place() -> None:
    loop = make_loop(sessions_trace(2), SERVER)
    roomy = replace(SERVER, capacity_blocks=1000)
    assert (
        run_loop(loop, "resident", roomy).turn_s.tolist() == run_loop(loop, "ageing", roomy).turn_s.tolist()
    )


def test_the_bound_lets_a_session_in_that_never_fits() -> None:
    large = [9000 + i for i in range(30)]
    small = [
        [*(1000 * s + i for i in range(10)), 1000 * s + 100 + turn] for turn in range(100) for s in (1, 2)
    ]
    trace = trace_of([*small[:2], large, *small[2:]])
    sessions = np.asarray([1, 2, 0, *([1, 2] * 99)], dtype=np.int64)
    loop = make_loop(replace(trace, sessions=sessions, gaps_s=np.zeros(201)), SERVER)
    server = replace(SERVER, capacity_blocks=40)
    took = [
        run_loop(loop, "resident", replace(server, bound_s=bound)).turn_s[2] for bound in (25.0, 60.0, 1e9)
    ]
    alone = 30.0 + 1.0
    assert took[0] == pytest.approx(25.0 + alone, abs=1.0)
    assert took[1] == pytest.approx(60.0 + alone, abs=1.0)
    assert took[2] > 200.0


def test_sessions_are_found_by_their_prefixes() -> None:
    trace = trace_of([[1, 2, 3], [7, 8, 9], [1, 2, 4, 5], [7, 8, 10], [1, 2, 4, 6]])
    assert make_loop(trace, SERVER).sessions.tolist() == [0, 1, 0, 1, 0]


def test_unknown_order() -> None:
    with pytest.raises(ConfigError, match="unknown order 'x'"):
        run_loop(make_loop(sessions_trace(0), SERVER), "x", SERVER)
