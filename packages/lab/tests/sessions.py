"""A made-up trace of sessions that leave branches, and the same with other names."""

from dataclasses import replace
from typing import Literal

import numpy as np

from stemma_lab.replay import replay
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.request import TraceRequest

CAPACITY = 400


def branching_trace(num_sessions: int = 220, span_s: float = 6000.0, seed: int = 3) -> Trace:
    """Return sessions of 6 to 30 turns, half a minute apart, some of which go back to a beginning every time.

    Nothing but the names tells a branch that was left from one whose next turn is still to come.
    """
    rng = np.random.default_rng(seed)
    requests: list[TraceRequest] = []
    next_id = 0
    for session, start in enumerate(np.sort(rng.uniform(0.0, span_s, num_sessions)).tolist()):
        now = start
        chain: list[int] = []
        for _ in range(int(rng.integers(6, 31))):
            if len(chain) > 8 and rng.random() < 0.5:
                del chain[2:]
            num_new = int(rng.integers(4, 12))
            chain += range(next_id, next_id + num_new)
            next_id += num_new
            ids = np.asarray(chain, dtype=np.int64)
            num_tokens = 16 * len(chain)
            requests.append(TraceRequest(now, ids, num_tokens, 50, len(chain), session=session))
            now += float(rng.lognormal(3.4, 0.4))
    return collect("branching", lambda: 16, requests)


def renamed(trace: Trace, names: Literal["absent", "equal", "shuffled", "new"]) -> Trace:
    """Return the trace with other names of sessions."""
    num = trace.num_requests
    sessions = {
        "absent": np.full(num, -1),
        "equal": np.zeros(num, dtype=np.int64),
        "shuffled": np.random.default_rng(1).permutation(trace.sessions),
        "new": np.arange(num),
    }[names]
    return replace(trace, sessions=sessions.astype(np.int64))


def hits(trace: Trace) -> int:
    """Return the hit blocks of `hazard` in `CAPACITY` blocks."""
    return int(replay(trace, "hazard", CAPACITY).num_hit_blocks.sum())
