"""How many draft tokens are worth verifying: learned acceptance against measured cost.

A draft of k tokens whose tokens hold with probability a each yields a + a^2 + ... + a^k tokens beyond the one
that the step gives anyway. Verifying them makes the step longer by k times what a row costs. The best k is
where the yield, at the time a token takes now, exceeds that by most; where it never does, k is 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_COST_DECAY = 0.98
_SOLVE_EVERY = 8
_FIRST_PROBE_AFTER = 8
_LAST_PROBE_AFTER = 256
_PROBE_TOKENS = 2
_PRIOR_WEIGHT = 3.0
_ACCEPTANCE_DECAY = 0.85
_GLOBAL_DECAY = 0.995


class StepCost:
    """Step time as a + b rows + c context tokens, fitted online to the steps that ran.

    Least squares with exponential forgetting; a weak prior (b = c = 0) keeps it solvable while all steps look
    alike, so the first drafts are tried, and then known.
    """

    def __init__(self) -> None:
        # Lists of floats: at this size numpy's calls cost more than the arithmetic.
        self._products = [0.0] * 9
        self._targets = [0.0] * 3
        self._weights = [0.0] * 3
        self._num_steps = 0
        self._duration_s = 0.0
        self._num_tokens = 0.0
        self._num_rows = 0.0
        self._context = 0.0

    @property
    def row_s(self) -> float:
        """Seconds that one more row adds to a step."""
        return max(0.0, self._weights[1])

    @property
    def token_s(self) -> float:
        """Seconds a token takes at present: time of recent steps over the tokens they gave."""
        return self._duration_s / self._num_tokens if self._num_tokens else 1.0

    def rows_within(self, duration_s: float) -> int | None:
        """Return how many rows of the recent mean context a step of `duration_s` has; None: not known yet."""
        if self._num_steps < _SOLVE_EVERY:
            return None
        base_s, row_s, context_s = self._weights
        each_s = row_s + context_s * self._context / self._num_rows
        return None if each_s <= 0.0 else max(0, int((duration_s - max(0.0, base_s)) / each_s))

    def observe(self, num_rows: int, num_context_tokens: int, num_tokens: int, duration_s: float) -> None:
        """Learn from a step of decodes alone that gave `num_tokens` tokens."""
        if num_tokens == 0:
            return
        features = (1.0, float(num_rows), num_context_tokens / 1024)
        added = (one * other for one in features for other in features)
        self._products = [old * _COST_DECAY + new for old, new in zip(self._products, added, strict=True)]
        self._targets = [
            old * _COST_DECAY + one * duration_s for old, one in zip(self._targets, features, strict=True)
        ]
        self._duration_s = self._duration_s * _COST_DECAY + duration_s
        self._num_tokens = self._num_tokens * _COST_DECAY + num_tokens
        self._num_rows = self._num_rows * _COST_DECAY + num_rows
        self._context = self._context * _COST_DECAY + features[2]
        self._num_steps += 1
        if self._num_steps < _SOLVE_EVERY or self._num_steps % _SOLVE_EVERY == 0:
            products = np.array(self._products).reshape(3, 3) + np.diag([1e-9, 0.1, 0.1])
            self._weights = np.linalg.solve(products, self._targets).tolist()


class Acceptance:
    """Probability that a draft token of one kind of evidence holds, decayed counts over a prior.

    With a `parent`, that one's probability is the prior: a request starts with what others learned.
    """

    def __init__(self, prior: float | Acceptance, *, decay: float = _ACCEPTANCE_DECAY) -> None:
        self._prior = prior
        self._decay = decay
        self._num_held = 0.0
        self._num_tried = 0.0

    @property
    def probability(self) -> float:
        """The present estimate."""
        prior = self._prior.probability if isinstance(self._prior, Acceptance) else self._prior
        return (self._num_held + _PRIOR_WEIGHT * prior) / (self._num_tried + _PRIOR_WEIGHT)

    def observe(self, num_drafted: int, num_held: int) -> None:
        """Learn from a verified draft; tokens behind the first that failed say nothing."""
        self._num_held = self._num_held * self._decay + num_held
        self._num_tried = self._num_tried * self._decay + min(num_drafted, num_held + 1)
        if isinstance(self._prior, Acceptance):
            self._prior.observe(num_drafted, num_held)


PRIORS = {
    "mtp": 0.8,
    "tree": 0.8,
    "lookup-long": 0.8,
    "lookup-medium": 0.5,
    "lookup-short": 0.2,
    "branch-long": 0.8,
    "branch-medium": 0.5,
    "branch-short": 0.2,
    "pool": 0.4,
    "window": 0.2,
}
"""Probabilities assumed before anything was verified, by evidence."""


class AcceptanceTable:
    """The acceptance of each kind of evidence over all requests; requests derive their own from it."""

    def __init__(self, kinds: Iterable[str] = PRIORS) -> None:
        """`kinds`: those of the sources in use, since `best_probability` begins with their priors."""
        self._shared = {kind: Acceptance(PRIORS[kind], decay=_GLOBAL_DECAY) for kind in kinds}

    @property
    def best_probability(self) -> float:
        """Probability that a token holds, for the kind of evidence that holds most often."""
        return max(one.probability for one in self._shared.values())

    def for_request(self) -> dict[str, Acceptance]:
        """Return estimates for a new request, which also teach the shared ones."""
        return {kind: Acceptance(shared) for kind, shared in self._shared.items()}


def best_length(probability: float, most: int, cost: StepCost) -> tuple[int, float]:
    """Return the draft length, 0 to `most`, with the largest gain, and this gain in seconds."""
    token_s, row_s = cost.token_s, cost.row_s
    best, best_gain, gain, holds = 0, 0.0, 0.0, 1.0
    for length in range(1, most + 1):
        holds *= probability
        gain += holds * token_s - row_s
        if gain > best_gain:
            best, best_gain = length, gain
        elif holds * token_s < row_s:
            break
    return best, best_gain


class Probe:
    """When to verify a short draft that isn't expected to pay, because traffic changes. Rarer after each
    failure."""

    def __init__(self) -> None:
        self._wait = _FIRST_PROBE_AFTER
        self._num_declined = 0

    def decline(self) -> int:
        """Count a step that didn't use an available draft; return how many tokens to try nevertheless."""
        self._num_declined += 1
        if self._num_declined < self._wait:
            return 0
        self._num_declined = 0
        self._wait = min(2 * self._wait, _LAST_PROBE_AFTER)
        return _PROBE_TOKENS

    def succeed(self) -> None:
        """Drafts hold again: probe as often as in the beginning."""
        self._wait = _FIRST_PROBE_AFTER
        self._num_declined = 0
