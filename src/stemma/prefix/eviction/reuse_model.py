"""ReuseModel: how likely a block is to be used again, by age and kind, learned online.

A *lifetime* of a block runs from one use to the next. Lifetimes are sorted into classes by six features: who
goes on after the answer (of tools, how slow they are: `tool_paces.py`), how long the answer is, how often the
block was used, whether it is the last of its prompt, how long the prompt is, and the conversation's last
pause. For each class the model keeps the hazard of reuse per second in age bins (log scale), as in actuarial
life tables: reuses in a bin divided by the time at risk in it. Open lifetimes count
as survivors up to their age.

Few classes have enough lifetimes of their own, so hazards are composed: a hazard common to all, times a
factor per level and age bin of each feature (iterative proportional fitting; Deming and Stephan, 1940), each
factor shrunk towards 1 as by a gamma prior. The blocks of a prompt are reused together, so a lifetime of a
prompt of n blocks has weight 1/sqrt(n), and priors are measured in typical reuses.

The value of a block per second of keeping it is its Gittins index: over all horizons, the largest ratio of
the probability of reuse to the expected time until reuse or horizon (J. Gittins, 1979). It accounts for a
hazard that first rises, as with humans who read and type, before the peak is reached.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.policy import NO_CONCLUSION, Conclusion, Ending
from stemma.prefix.eviction.tool_paces import NUM_PACES

Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_GROWTH = 1.35
_NUM_BINS = 40
AGE_EDGES_S: Float64 = np.concatenate([[0.0], 0.5 * _GROWTH ** np.arange(_NUM_BINS - 1)])
"""Starts of the age bins; the last begins after about 12 hours."""
_WIDTHS_S: Float64 = np.diff(np.append(AGE_EDGES_S, AGE_EDGES_S[-1] * _GROWTH))
_EDGE_LIST = AGE_EDGES_S.tolist()

_COUNT_EDGES = np.array([1, 2, 4, 8, 32])
_LENGTH_EDGES = (4, 8, 16, 32, 64)
_PAUSE_EDGES_S = (2.0, 10.0, 30.0, 90.0, 300.0)
NO_PAUSE = len(_PAUSE_EDGES_S) + 1
"""Level of a prompt that continues nothing."""

_OUTPUT_EDGES = (100, 200, 400, 1000)

# Levels of each feature and what one level adds to the class.
_LEVELS = (
    len(_COUNT_EDGES) + 1,
    2,
    len(_LENGTH_EDGES) + 1,
    NO_PAUSE + 1,
    len(Ending) + NUM_PACES - 1,  # a tool of each pace is an ending of its own
    len(_OUTPUT_EDGES) + 1,
)
_STRIDES = tuple(prod(_LEVELS[place + 1 :]) for place in range(len(_LEVELS)))
NUM_CLASSES = prod(_LEVELS)
_COUNT_STEP: npt.NDArray[np.int32] = (
    np.searchsorted(_COUNT_EDGES, np.arange(_COUNT_EDGES[-1] + 2)) * _STRIDES[0]
).astype(np.int32)

_HALF_LIFE_S = 1800.0
_PRIOR_REUSES = 3.0
_NUM_SWEEPS = 2
_MIN_RATE = 1e-12
_MAX_ENDED = 1 << 16
"""Ended lifetimes kept one by one (20 bytes each); beyond, they are counted before the next fit."""


def age_bin(age_s: float) -> int:
    """Return the bin of an age of at least 0."""
    return bisect_right(_EDGE_LIST, age_s) - 1


def pause_level(pause_s: float) -> int:
    """Return the level of a pause between two uses of a conversation."""
    for level, edge in enumerate(_PAUSE_EDGES_S):
        if pause_s <= edge:
            return level
    return NO_PAUSE - 1


def classify(
    counts: npt.NDArray[np.int32],
    num_prompt_blocks: int,
    pause: int,
    conclusion: Conclusion = NO_CONCLUSION,
    pace: int = 0,
) -> npt.NDArray[np.int32]:
    """Return the class of each block of a prompt's chain; the last one ends the prompt.

    `counts` are uses so far, this one included. `pause` is a level, and so is `pace`, of the called tools.
    """
    length = bisect_left(_LENGTH_EDGES, num_prompt_blocks)
    output = bisect_left(_OUTPUT_EDGES, conclusion.num_output_tokens)
    ending = len(Ending) + pace - 1 if pace else conclusion.ending
    level = length * _STRIDES[2] + pause * _STRIDES[3] + ending * _STRIDES[4] + output
    classes = _COUNT_STEP[np.minimum(counts, len(_COUNT_STEP) - 1)] + np.int32(level)
    classes[-1] += _STRIDES[1]
    return classes


@dataclass(frozen=True, slots=True)
class OpenLifetimes:
    """Blocks, resident or remembered, that wait for their next use."""

    classes: npt.NDArray[np.int32]
    starts_s: Float64
    """Time of the last use of each."""
    weights: Float64


class ReuseModel:
    """Hazards per class and age, and the index that ranks blocks by them."""

    def __init__(self) -> None:
        self._reuses: Float64 = np.zeros(NUM_CLASSES * _NUM_BINS)
        """Weighted reuses by class and age bin; weights are relative to the time `_origin_s`."""
        self._ended: list[tuple[npt.NDArray[np.int32], Float64, Float64, float]] = []
        """Lifetimes that `learn` was told and `_count_ended` hasn't counted yet."""
        self._num_ended = 0
        """Lifetimes in it."""
        self._origin_s = 0.0
        self._typical_reuse = 1.0
        """Moving average of the weight of all blocks that are reused at once."""
        self._censored: Float64 = np.zeros(NUM_CLASSES * _NUM_BINS)
        """The same for lifetimes that were dropped before they ended."""
        self.num_reuses = 0
        """Prompts that reused something."""
        self.is_fitted = False
        self._index: Float64 = (1.0 / (AGE_EDGES_S + 1.0))[None, :]
        """Values by row and age bin; the last row is that of all classes together."""
        self._row_of: Int32 = np.zeros(NUM_CLASSES, dtype=np.int32)
        self._hazards: Float64 = np.zeros((1, _NUM_BINS))
        """By row and age bin."""

    def learn(self, classes: npt.NDArray[np.int32], starts_s: Float64, weights: Float64, now: float) -> None:
        """Note that lifetimes of these classes end now by a reuse."""
        self._ended.append((classes, starts_s, weights, now))
        self._num_ended += len(classes)
        self._typical_reuse += 0.01 * (len(weights) * weights.item(-1) - self._typical_reuse)
        self.num_reuses += 1
        if self._num_ended >= _MAX_ENDED:  # a cache that never evicts never fits
            self._fade(now)
            self._count_ended()

    def censor(self, lifetimes: OpenLifetimes, now: float) -> None:
        """Note that these lifetimes were dropped about now; nothing is known of their end."""
        self._fade(now)
        self._add(self._censored, lifetimes, now)

    def value_of(self, class_id: int, age_s: float) -> float:
        """Return the value per second of a block of this class at an age of at least 0."""
        return self._index.item(self._row_of.item(class_id), age_bin(age_s))

    def values_of(self, classes: Int32, ages_s: Float64) -> Float64:
        """Return the values per second of blocks; the same shape."""
        bins = np.searchsorted(AGE_EDGES_S, ages_s, side="right") - 1
        return self._index[self._row_of[classes], bins]

    @property
    def prior_weight(self) -> float:
        """Weight of what is assumed before anything was seen, in that of reuses."""
        return _PRIOR_REUSES * max(self._typical_reuse, 1e-6)

    def expected_reuses(self, classes: Int32, ages_s: Float64) -> Float64:
        """Return the sum of the hazards of blocks up to an age; the same shape."""
        bins = np.searchsorted(AGE_EDGES_S, ages_s, side="right") - 1
        rows, inverse = np.unique(self._row_of[classes], return_inverse=True)
        expected = self._hazards[rows] * _WIDTHS_S
        before = (np.cumsum(expected, axis=1) - expected)[inverse, bins]
        return np.asarray(before + self._hazards[rows][inverse, bins] * (ages_s - AGE_EDGES_S[bins]))

    def expected_between(self, classes: Int32, from_s: Float64, to_s: Float64) -> Float64:
        """Return the sum of the hazards of blocks from one age to a later one, else 0; the same shape."""
        until = self.expected_reuses(classes, np.maximum(to_s, 0.0))
        return np.maximum(until - self.expected_reuses(classes, np.maximum(from_s, 0.0)), 0.0)

    def fit(self, lifetimes: OpenLifetimes, now: float) -> None:
        """Estimate all hazards again. Takes some milliseconds; grows with the number of lifetimes."""
        self._fade(now)
        self._count_ended()
        reuses = self._reuses.reshape(NUM_CLASSES, _NUM_BINS)
        waiting = self._waiting(lifetimes, now) + self._censored.reshape(NUM_CLASSES, _NUM_BINS)
        present = np.flatnonzero((reuses.any(axis=1)) | (waiting.any(axis=1)))
        if not len(present):
            return
        reuses = reuses[present]
        at_risk_s = time_at_risk_s(reuses, waiting[present])
        prior = self.prior_weight
        common = common_hazard(reuses.sum(axis=0), at_risk_s.sum(axis=0), prior)
        levels = tuple(present // stride % span for span, stride in zip(_LEVELS, _STRIDES, strict=True))
        hazards = compose_hazards(common, levels, reuses, at_risk_s, prior)
        self._hazards = np.vstack([hazards, common])
        self._index = gittins_index(self._hazards)
        self._row_of = np.full(NUM_CLASSES, len(present), dtype=np.int32)
        self._row_of[present] = np.arange(len(present))
        self.is_fitted = True

    def _fade(self, now: float) -> None:
        """Fade the counts so far. Must precede counting, so that no weight exceeds 1."""
        fade = np.exp2((self._origin_s - now) / _HALF_LIFE_S)
        self._reuses *= fade
        self._censored *= fade
        self._origin_s = now

    def _count_ended(self) -> None:
        if self._ended:
            classes, starts_s, weights, ends_s = zip(*self._ended, strict=True)
            lengths = [len(each) for each in classes]
            lifetimes = OpenLifetimes(*(np.concatenate(each) for each in (classes, starts_s, weights)))
            self._add(self._reuses, lifetimes, np.repeat(ends_s, lengths))
            self._ended.clear()
            self._num_ended = 0

    def _add(self, totals: Float64, lifetimes: OpenLifetimes, ends_s: Float64 | float) -> None:
        ages = np.maximum(ends_s - lifetimes.starts_s, 0.0)
        bins = np.searchsorted(AGE_EDGES_S, ages, side="right") - 1
        decayed = lifetimes.weights * np.exp2((lifetimes.starts_s - self._origin_s) / _HALF_LIFE_S)
        np.add.at(totals, lifetimes.classes * _NUM_BINS + bins, decayed)

    def _waiting(self, lifetimes: OpenLifetimes, now: float) -> Float64:
        """Return the weight of open lifetimes by class and age bin."""
        ages = np.maximum(now - lifetimes.starts_s, 0.0)
        bins = np.searchsorted(AGE_EDGES_S, ages, side="right") - 1
        weights = lifetimes.weights * np.exp2(-ages / _HALF_LIFE_S)
        cells = lifetimes.classes.astype(np.int64) * _NUM_BINS + bins
        total = np.bincount(cells, weights=weights, minlength=NUM_CLASSES * _NUM_BINS)
        return np.asarray(total.reshape(NUM_CLASSES, _NUM_BINS))


def time_at_risk_s(reuses: Float64, waiting: Float64) -> Float64:
    """Return the time at risk in each age bin; arguments and result have shape [num_classes, num_bins].

    `reuses` and `waiting` are the weights of the lifetimes that ended by a reuse, or are open, in a bin.
    """
    ended = reuses + waiting
    survivors = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
    return (survivors + 0.5 * ended) * _WIDTHS_S


def common_hazard(reuses: Float64, at_risk_s: Float64, prior: float) -> Float64:
    """Return the hazard of all classes together, shape [num_bins].

    Bins with little data continue the hazard of the previous bin, falling as 1 / age.
    """
    hazard = np.empty(_NUM_BINS)
    expected = max(float(reuses.sum() / max(at_risk_s.sum(), 1e-9)), _MIN_RATE)
    for number in range(_NUM_BINS):
        hazard[number] = (reuses[number] + prior) / (at_risk_s[number] + prior / expected)
        expected = max(hazard[number] / (_GROWTH if number else 1.0), _MIN_RATE)
    return hazard


def compose_hazards(
    common: Float64, levels: tuple[Int64, ...], reuses: Float64, at_risk_s: Float64, prior: float
) -> Float64:
    """Return hazards of classes, shape [num_classes, num_bins], as a product of factors per feature.

    `levels` holds the level of each class for each feature; `prior` weighs a factor of 1, in reuses.
    """
    hazards = np.repeat(common[None, :], len(reuses), axis=0)
    members = []
    for feature in levels:
        span, level = np.unique(feature, return_inverse=True)
        members.append((level, (level[None, :] == np.arange(len(span))[:, None]).astype(np.float64)))
    for _ in range(_NUM_SWEEPS):
        for level, member in members:
            observed = member @ reuses
            expected = member @ (hazards * at_risk_s)
            overall = (observed.sum(axis=1) + prior) / (expected.sum(axis=1) + prior)
            factors = (observed + prior) / (expected * overall[:, None] + prior) * overall[:, None]
            hazards *= factors[level]
    return hazards


def gittins_index(hazards: Float64) -> Float64:
    """Return max over horizons of P(reuse) / E(time held), for each start bin; same shape as `hazards`."""
    expected = hazards * _WIDTHS_S
    # Within a bin the hazard is constant: the time held is P(reuse) / hazard, or the bin's width if tiny.
    reuse = -np.expm1(-expected)
    held_s = np.where(expected > 1e-9, reuse / np.maximum(hazards, _MIN_RATE), _WIDTHS_S)
    index = np.empty_like(hazards)
    for start in range(_NUM_BINS):
        before = np.cumsum(expected[:, start:], axis=1) - expected[:, start:]
        survival = np.exp(-before)
        gain = np.cumsum(survival * reuse[:, start:], axis=1)
        time = np.cumsum(survival * held_s[:, start:], axis=1)
        index[:, start] = (gain / time).max(axis=1)
    return index
