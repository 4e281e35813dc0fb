"""Drafts of the model itself, by its layer for multi-token prediction: what they cost, and when they pay.

Other sources cost next to nothing, so they are asked for every sequence and the best draft is taken. The
layer's passes take time on the device, and one pass serves all sequences of a step. So it is decided first
how deep to go, for all together; what the passes gave is then one more proposal for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from stemma.engine.drafts.adaptive import StepCost
from stemma.engine.drafts.source import Proposal

EVIDENCE = "mtp"
_PASS_WEIGHT = 0.1


class Predicted:
    """The model's guesses for one sequence, kept until the next step asks for them."""

    def __init__(self) -> None:
        self._token_ids: tuple[int, ...] = ()
        self._num_tokens = -1

    def offer(self, num_tokens: int, token_ids: Sequence[int]) -> None:
        """Remember the guess that follows the first `num_tokens` tokens."""
        self._num_tokens, self._token_ids = num_tokens, tuple(token_ids)

    def take(self, num_tokens: int, max_tokens: int) -> Proposal | None:
        """Return at most `max_tokens` of the guess for a sequence of that length; None if there is none."""
        token_ids = self._token_ids[:max_tokens] if num_tokens == self._num_tokens else ()
        self._token_ids = ()
        return Proposal(token_ids, EVIDENCE) if token_ids else None


class PassCost:
    """Seconds of one pass of the layer, a moving average."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._pending_s = 0.0

    def observe(self, num_passes: int, duration_s: float) -> None:
        """Learn from the passes before one step."""
        seconds = duration_s / num_passes
        self.seconds += (_PASS_WEIGHT if self.seconds else 1.0) * (seconds - self.seconds)
        self._pending_s += duration_s

    def take_pending(self) -> float:
        """Return the seconds observed since the last call: they belong to the step that follows them."""
        pending, self._pending_s = self._pending_s, 0.0
        return pending


def best_depth(
    probabilities: Sequence[float],
    others: Sequence[float],
    limits: Sequence[int],
    cost: StepCost,
    pass_s: float,
) -> tuple[int, list[bool]]:
    """Return how many passes gain most, 0 if none pays, and which sequences gain from them.

    For each sequence: the probability that a guessed token holds, the gain in seconds of the best other
    draft, and the most tokens that may be guessed. Each pass takes `pass_s` for all together.
    """
    best, best_gain = 0, 0.0
    best_wanted = [False] * len(limits)
    gains = [0.0] * len(limits)
    for depth in range(1, max(limits, default=0) + 1):
        for i, (probability, limit) in enumerate(zip(probabilities, limits, strict=True)):
            if depth <= limit:
                gains[i] += max(0.0, probability**depth * cost.token_s - cost.row_s)
        extra = [gain - other for gain, other in zip(gains, others, strict=True)]
        total = sum(one for one in extra if one > 0) - depth * pass_s
        if total > best_gain:
            best, best_gain, best_wanted = depth, total, [one > 0 for one in extra]
    return best, best_wanted
