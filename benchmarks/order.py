"""Orders of waiting requests on a few-shot batch, as in RadixAttention's ablation (arXiv:2312.07104).

``python -m benchmarks.order``: 57 subjects with prompts of 8 to 39 blocks, 20 questions each, shuffled, one
more block a question; all at once, or 20 a second. Prints the share of an unlimited cache's hits, and how
long requests wait by the model of prefill time (60,000 tokens a second).
"""

from __future__ import annotations

import numpy as np

from stemma_lab.order import ORDERS, QueueServer, replay_order
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.request import TraceRequest

BLOCK_SIZE = 512
SUBJECTS, QUESTIONS = 57, 20
ARRIVALS_PER_S = 20.0
CAPACITIES = (150, 400)


def few_shot_batch(seed: int = 1) -> Trace:
    """Return the trace: each prompt is its subject's worked examples and a question of its own."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, 40, SUBJECTS)
    ends = np.cumsum(lengths)
    examples = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    order = rng.permutation(np.repeat(np.arange(SUBJECTS), QUESTIONS))
    requests = []
    for number, subject in enumerate(order):
        ids = np.append(examples[subject], ends[-1] + number).astype(np.int64)
        tokens = len(ids) * BLOCK_SIZE
        requests.append(TraceRequest(number / ARRIVALS_PER_S, ids, tokens, 200, num_prompt_blocks=len(ids)))
    return collect("few-shot batch", lambda: BLOCK_SIZE, requests)


def main() -> None:
    trace = few_shot_batch()
    for time_scale, arrivals in ((0.0, "all at once"), (1.0, "20 a second")):
        for capacity in CAPACITIES:
            for order in ORDERS:
                server = QueueServer(capacity, "lru", PrefillModel(60_000))
                found = replay_order(trace, order, server, time_scale)
                print(
                    f"{arrivals}, {capacity} blocks, {order:<15} share {found.share_of_optimal:6.1%}  "
                    f"wait mean {found.wait_mean_s:6.1f} s, p99 {found.wait_p99_s:6.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
