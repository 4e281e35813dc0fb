"""A made-up agentic trace: long sessions that share nothing; tools answer in seconds, humans in minutes."""

import numpy as np

from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.request import TraceRequest

BLOCK_SIZE = 512


def agentic_trace(
    num_sessions: int = 300,
    mean_turns: float = 28.0,
    span_s: float = 3600.0,
    share_human: float = 0.12,
    seed: int = 5,
) -> Trace:
    """Return sessions whose prompt grows by a few blocks each turn; the last block of a prompt is partial."""
    rng = np.random.default_rng(seed)
    requests: list[TraceRequest] = []
    next_id = 0
    for start in np.sort(rng.uniform(0.0, span_s, num_sessions)):
        now = float(start)
        length = int(rng.integers(15_000, 45_000))
        chain: list[int] = []
        for _ in range(1 + int(rng.geometric(1.0 / mean_turns))):
            num_full, num_all = length // BLOCK_SIZE, -(-length // BLOCK_SIZE)
            while len(chain) < num_full:
                chain.append(next_id)
                next_id += 1
            ids = list(chain)
            if num_all > num_full:
                ids.append(next_id)
                next_id += 1
            requests.append(
                TraceRequest(now, np.asarray(ids, dtype=np.int64), length, 200, num_prompt_blocks=len(ids))
            )
            length += int(rng.lognormal(7.0, 0.9))
            human = rng.random() < share_human
            now += float(rng.lognormal(4.8, 1.0) if human else 2.0 + rng.lognormal(1.6, 0.7))
    return collect("agentic", lambda: BLOCK_SIZE, requests)
