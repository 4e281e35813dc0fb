"""Sessions: which branches a conversation has left, and what that is worth.

Clients name their conversations. Where a later prompt of a session shares only a beginning with the one
before (history that was edited or compacted), the rest of that one is *left*, unless somebody else uses it.
The tree can't tell this from a branch whose next turn is still to come.

Names are what clients send: the same for all requests, another for each, or millions of them. So they arrive
as numbers (`keys.session_number`), few are remembered, and being left has no effect before the traffic has
shown one: reuses of left blocks against those that their classes let expect (`reuse_trust.py`), of a sample.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.records import RecordTable
from stemma.prefix.eviction.reuse_model import ReuseModel
from stemma.prefix.eviction.reuse_trust import ReuseTrust

Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]

_MAX_SESSIONS = 4096
_MAX_BLOCKS = 1 << 19
"""Records of their last prompts together, 4 bytes each."""
RESERVED_BYTES = 4 * _MAX_BLOCKS + 400 * _MAX_SESSIONS
_SURE = 2.0
"""Factors nearer to 1 count as 1: where names tell nothing, they were .83 to .99 (docs/project/log.md)."""
_SAMPLED = 8
"""One left block in so many is judged."""
_SAMPLE_SHIFT = np.uint64(61)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MAX_ENDED = 1 << 14
"""Reuses of left blocks kept one by one until they are counted."""
_NO_RECORDS: Int32 = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _LastPrompt:
    """What a session sent last."""

    number: int
    """Of the prompt."""
    chain: Int32
    """Records of its blocks from the root."""
    is_recalled: bool = False
    """Blocks that a load brought say so; no prompt of the session was seen."""


class Sessions:
    """The last prompt of each session, and the worth of left branches."""

    def __init__(self, table: RecordTable, model: ReuseModel) -> None:
        self._table, self._model = table, model
        self._last: OrderedDict[int, _LastPrompt] = OrderedDict()
        """By session; the longest silent first."""
        self._num_blocks = 0
        """Records in it."""
        self._trust = ReuseTrust([1.0])
        self.factor = 1.0
        """By how much a left block is worth more than one of its class."""
        self._ended: list[tuple[Int32, Float64, Float64, Float64, float]] = []
        """Left blocks that were used again: classes, last use, since when they were left, weights; when."""
        self._num_ended = 0
        self._judged_s = -math.inf
        """Until when it is known what was expected of left blocks."""

    def follow(self, session: int, number: int, chain: Int32, now: float) -> Int32:
        """Note that a session sends the prompt of that number, whose blocks so far have the records `chain`.

        Return the records, from the root, of what it left by this; nobody else has used those since.
        """
        before = self._keep(session, _LastPrompt(number, chain))
        if before is None or before.number == number:
            return _NO_RECORDS
        table = self._table
        left: Int32 = before.chain[table.users[before.chain] == before.number]
        sampled = left[(table.prints[left] * _MULTIPLIER) >> _SAMPLE_SHIFT == 0]
        if len(sampled):
            table.has_left = True
            table.left_s[sampled] = now
        return left

    def recall(self, session: int, number: int, chain: Int32) -> None:
        """Take blocks that a load brought for the last prompt of the session which they came with.

        That was before a restart, or so long ago that it is forgotten; what is known of a session stays.
        """
        before = self._last.get(session)
        if before is not None:
            if not before.is_recalled:
                return
            if before.number != number:  # they came in several loads
                self._table.users[chain] = number = before.number
                chain = np.concatenate((before.chain, chain))
        self._keep(session, _LastPrompt(number, chain, is_recalled=True))

    def _keep(self, session: int, last: _LastPrompt) -> _LastPrompt | None:
        """Remember a session's last prompt; return the one before."""
        before = self._last.pop(session, None)
        self._last[session] = last
        self._num_blocks += len(last.chain) - (0 if before is None else len(before.chain))
        while len(self._last) > _MAX_SESSIONS or (self._num_blocks > _MAX_BLOCKS and len(self._last) > 1):
            self._num_blocks -= len(self._last.popitem(last=False)[1].chain)
        return before

    def reused(self, records: Int32, now: float) -> None:
        """Note, before their lifetimes end, that these blocks are used again."""
        table = self._table
        left = records[table.left_s[records] < math.inf]
        if len(left):
            self._ended.append(
                (table.classes[left], table.used_s[left], table.left_s[left], table.weights[left], now)
            )
            self._num_ended += len(left)
            if self._num_ended >= _MAX_ENDED:  # a cache that never evicts never judges
                self._count_ended()

    def judge(self, now: float) -> None:
        """Compute `factor` anew, before the hazards by which it is judged change."""
        self._count_ended()
        left = self._table.left()
        if len(left):
            table = self._table
            self._expect(
                table.classes[left], table.used_s[left], table.left_s[left], table.weights[left], now
            )
        self._trust.judge(self._model.prior_weight, now)
        self._judged_s = now
        ratio = self._trust.factor(0)
        self.factor = 1.0 if 1.0 / _SURE < ratio < _SURE else ratio

    def _count_ended(self) -> None:
        if self._ended:
            classes, used_s, left_s, weights, ends_s = zip(*self._ended, strict=True)
            lengths = [len(each) for each in classes]
            all_weights = np.concatenate(weights)
            self._expect(
                np.concatenate(classes),
                np.concatenate(used_s),
                np.concatenate(left_s),
                all_weights,
                np.repeat(ends_s, lengths),
            )
            if self._model.is_fitted:
                self._trust.reused(np.zeros(len(all_weights), dtype=np.int64), _SAMPLED * all_weights)
            self._ended.clear()
            self._num_ended = 0

    def _expect(
        self, classes: Int32, used_s: Float64, left_s: Float64, weights: Float64, ends_s: Float64 | float
    ) -> None:
        """Count what was expected of left blocks since they were left, or counted last, until `ends_s`."""
        if self._model.is_fitted:
            since_s = np.maximum(left_s, self._judged_s)
            expected = self._model.expected_between(classes, since_s - used_s, ends_s - used_s)
            self._trust.expect(np.zeros(len(classes), dtype=np.int64), _SAMPLED * weights * expected)
