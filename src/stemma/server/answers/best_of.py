"""``best_of``: of many sequences, keep those that the model itself finds most likely."""

from __future__ import annotations

from collections.abc import Sequence

from stemma.server.observe.collected import CollectedSequence


def keep_best(sequences: Sequence[CollectedSequence], n: int) -> Sequence[CollectedSequence]:
    """Return the `n` sequences with the highest mean log-probability per token, best first.

    If there are no more than `n`, they keep their order. A sequence without tokens comes last.
    """
    if len(sequences) <= n:
        return sequences
    return sorted(sequences, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(sequence: CollectedSequence) -> float:
    if not sequence.logprobs:
        return float("-inf")
    return sum(entry.logprob for entry in sequence.logprobs) / len(sequence.logprobs)
