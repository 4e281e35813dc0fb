"""hazard: keep what is likely to be used again soon, as learned from the traffic.

LRU assumes that reuse becomes less likely the longer a block has waited. Chat is different: right after an
answer nobody returns, a minute later many do. This policy learns the hazard of reuse by age and class of
block (`reuse_model.py`) and evicts the candidate with the lowest value per second of keeping. Records of
blocks survive eviction, in bounded memory. The policy uses only past events.

A learned order can lose if the load changes or has nothing to learn. Sampled caches under it and under LRU
are simulated in parallel (`shadows.py`), and this policy behaves as the one that is ahead.

Candidates of one class are in one queue. Within a class the lowest value is that of the least recently used
block or, while the hazard still rises, of the newest; only these two ends are compared across classes. Ranks
change with time, so the order of the ends is rebuilt once per second of the injected clock, in O(classes);
everything else is amortised O(log n).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from heapq import heappop, heappush
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.hint_trust import HINT_CLAIMS
from stemma.prefix.eviction.policy import NO_CONCLUSION, BlockTraits, Conclusion
from stemma.prefix.eviction.records import MAX_HINTS, RecordTable, max_ghosts_beside
from stemma.prefix.eviction.reuse_model import (
    NO_PAUSE,
    NUM_CLASSES,
    ReuseModel,
    classify,
    pause_level,
)
from stemma.prefix.eviction.reuse_trust import ReuseTrust
from stemma.prefix.eviction.sessions import RESERVED_BYTES, Sessions
from stemma.prefix.eviction.shadows import Shadows
from stemma.prefix.eviction.stamped import StampedPolicy, resized
from stemma.prefix.eviction.tool_paces import ToolPaces
from stemma.types import BlockIds

Int32 = npt.NDArray[np.int32]

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_RERANK_S = 1.0
_FIT_SHARE, _MIN_FIT_S, _MAX_FIT_S = 0.04, 2.0, 60.0
"""Hazards are fitted each time the observed span has grown by this share, within these limits."""
_MIN_FIT_PROMPTS = 4
"""Minimum number of prompts between fits; each fit takes milliseconds."""
_MIN_REUSES = 150
_MIN_SPAN_S = 60.0
"""Number of prompts with reuse, and time, before the learned order is used."""
_MAX_OPEN_PROMPTS = 1024
_MIN_STALE = 4096
_MAX_DROPPED = 1 << 14
"""Dropped lifetimes kept one by one (130 bytes each); beyond, they are counted before the next fit."""
_GHOST_BYTES = 162
_UNCOUNTED_BYTES = 8 * 2**20
_LEFT = NUM_CLASSES * MAX_HINTS
"""Added to the queue of a block that its session left."""
_NO_RECORDS: Int32 = np.empty(0, dtype=np.int32)


class HazardPolicy(StampedPolicy):
    """Evicts the candidate with the lowest learned probability of reuse per second held."""

    name: ClassVar[str] = "hazard"

    def __init__(self, max_ghosts: int = 1 << 18) -> None:
        """Remember up to `max_ghosts` evicted blocks (about 150 bytes each), at most `GHOSTS_PER_BLOCK`
        for each block that it ever ranked at a time."""
        super().__init__()
        self._max_ghosts = max_ghosts
        self._records = RecordTable(max_ghosts)
        self._record_of: Int32 = np.zeros(len(self._stamps), dtype=np.int32)
        self._prompts: OrderedDict[int, tuple[Int32, int, int]] = OrderedDict()
        """Last block of a prompt being entered -> its chain of records, the level of its pause, number."""
        self._model = ReuseModel()
        self._paces = ToolPaces()
        self._trust = ReuseTrust(HINT_CLAIMS)
        self._sessions = Sessions(self._records, self._model)
        self._judged_s = -math.inf
        """Until when `_trust` knows what was expected of blocks."""
        self._next_fit_s = -math.inf
        self._prompts_until_fit = 0
        self._first_s: float | None = None
        self._shadows: Shadows | None = None
        self._capacity = 0
        """Number of blocks after the last eviction: the capacity of the shadows."""
        self._unseen_hits: Int32 = _NO_RECORDS
        """Hits not yet reported to the shadows: misses of the same prompt may follow."""
        self._num_prompts = 0
        self._unclassified: tuple[int, Int32, int] | None = None
        """Last block, records and pause of the prompt used last: it is classified when it stops growing."""
        self._learned = False
        """Whether ranks are the learned ones; otherwise they are LRU stamps."""
        self._live: dict[int, int] = {}
        """Candidate -> its entry in its queue: ``stamp << 32 | block``."""
        self._queues: dict[int, tuple[list[int], list[int]]] = {}
        """Class, hints, left or not -> heap of entries (oldest first) and stack of entries (newest last)."""
        self._num_entries = 0
        self._ends: list[tuple[float, int, int]] = []
        """Heap of (rank, entry, queue) with the ends of all queues; stale entries are skipped."""
        self._shown: dict[int, tuple[int, int]] = {}
        """Queue -> the entries that represent its ends in `_ends`."""
        self._rank_cache = (-1, -1.0, 0.0)
        """Class, time of use and value of the block ranked last."""
        self._run_queue, self._run_used_s, self._run_stamp = -1, 0.0, 0
        """Class, time and stamp of use of the last victim, until the clock or the candidates change."""
        self._held = -1
        """A candidate that follows the last victim; it is in no queue."""
        self._ranked_s = -math.inf
        self._now = 0.0

    def reserved_bytes(self, num_blocks: int) -> int:
        """Includes records of evicted blocks, and lifetimes that are not counted yet."""
        ghosts = max_ghosts_beside(num_blocks, self._max_ghosts)
        fixed = _UNCOUNTED_BYTES + RESERVED_BYTES
        return super().reserved_bytes(num_blocks) + _GHOST_BYTES * ghosts + fixed

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Enter blocks; those remembered from before their eviction end a lifetime here."""
        self._reserve(block_ids)
        self._advance(now)
        table = self._records
        if not traits.is_use:
            self._insert_ahead(block_ids, now, traits)
            return
        prompt = self._prompts.pop(traits.after, None)
        if self._unclassified is not None and self._unclassified[0] != traits.after:
            self._classify_prompt()
        depth = 0 if traits.after < 0 else table.depths.item(self._record_of.item(traits.after)) + 1
        records, known = table.enter(len(block_ids), traits, depth)
        self._record_of[block_ids] = records
        table.blocks[records] = block_ids
        if prompt is None:
            self._num_prompts += 1
            chain, pause, number = records, NO_PAUSE, self._num_prompts
        else:
            chain, pause, number = np.concatenate((prompt[0], records)), prompt[1], prompt[2]
        if len(known):
            pause = self._pause(known, now)
            self._end_lifetimes(known, now)
        self._stamp(block_ids)
        self._start_lifetimes(records, number, now)
        self._note_prompt(int(block_ids[-1]), chain, pause, number)
        if traits.session:
            self._leave(self._sessions.follow(traits.session, number, chain, now))
        elif traits.came_from:
            self._sessions.recall(traits.came_from, number, chain)
        if self._shadows is not None:
            hits, self._unseen_hits = self._unseen_hits, _NO_RECORDS
            looked_up = np.concatenate((hits, records)) if len(hits) else records
            self._shadows.look_up(looked_up, self._capacity, now)

    def hint(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Let other retention hints hold for blocks that are no candidates."""
        table, records = self._records, self._record_of[block_ids]
        table.rehint(records, traits)
        table.queues[records] = table.classes[records] + table.hints[records] * NUM_CLASSES

    def _insert_ahead(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Enter blocks that nobody has come back to: the lifetimes of those remembered go on."""
        self._classify_prompt()
        table = self._records
        depth = 0 if traits.after < 0 else table.depths.item(self._record_of.item(traits.after)) + 1
        records, known = table.enter(len(block_ids), traits, depth)
        self._record_of[block_ids] = records
        table.blocks[records] = block_ids
        table.hints[known] = table.queues[known] % _LEFT // NUM_CLASSES
        fresh = records[~np.isin(records, known)]
        if len(fresh):
            self._num_prompts += 1
            self._start_lifetimes(fresh, self._num_prompts, now)
            table.pauses[fresh] = NO_PAUSE
            self._classify(fresh, NO_PAUSE)
            if traits.came_from:
                self._sessions.recall(traits.came_from, self._num_prompts, fresh)
        self._stamp(block_ids)

    def access(self, block_ids: BlockIds, now: float) -> None:
        """End a lifetime of each block and start the next."""
        if not len(block_ids):
            return
        self._advance(now)
        self._classify_prompt()
        records = self._record_of[block_ids]
        pause = self._pause(records, now)
        self._num_prompts += 1
        self._end_lifetimes(records, now)
        self._stamp(block_ids)
        self._start_lifetimes(records, self._num_prompts, now)
        self._note_prompt(int(block_ids[-1]), records, pause, self._num_prompts)
        if self._shadows is not None:
            if len(self._unseen_hits):
                self._shadows.look_up(self._unseen_hits, self._capacity, now)
            self._unseen_hits = records

    def conclude(self, block_ids: BlockIds, conclusion: Conclusion) -> None:
        """Classify the blocks that no other prompt has used since once more."""
        self._classify_prompt()
        records = self._record_of[block_ids]
        table = self._records
        is_mine = table.users[records] == table.users[records[-1]]
        table.tools[records[is_mine]] = self._paces.number_of(conclusion.tools)
        self._classify(records, table.pauses.item(records[-1]), conclusion, is_mine)
        self._run_queue = -1
        tail = int(block_ids[-1])
        if tail in self._live:
            self.withdraw(tail)
            self.offer(tail)

    def offer(self, block_id: int) -> None:
        """Make the block a candidate."""
        if self._unclassified is not None:
            self._classify_prompt()
        record = self._record_of.item(block_id)
        queue = self._records.queues.item(record)
        self._live[block_id] = entry = self._stamps.item(block_id) << _ID_BITS | block_id
        if (
            queue == self._run_queue
            and self._records.used_s.item(record) == self._run_used_s
            and entry >> _ID_BITS <= self._run_stamp + 1
        ):
            self._hold(block_id)
        else:
            self._enqueue(entry, queue)

    def withdraw(self, block_id: int) -> None:
        """Withdraw the candidate."""
        if block_id == self._held:
            self._held = -1
        self._live.pop(block_id, None)
        if self._num_entries > 4 * len(self._live) + _MIN_STALE:
            self._rebuild_queues()

    def victim(self, now: float) -> int | None:
        """Return the candidate of lowest value, or None."""
        if self._held >= 0:
            if now == self._now:
                self._run_stamp = self._live[self._held] >> _ID_BITS
                return self._held
            self._enqueue_held()
        self._advance(now)
        live = self._live
        if not live:
            return None
        if now >= self._next_fit_s and self._prompts_until_fit <= 0:
            self._fit(now)
        learned = self._shadows is not None and self._shadows.learned_leads
        if now - self._ranked_s >= _RERANK_S or learned != self._learned:
            self._learned = learned
            self._rank_ends()
        ends = self._ends
        while ends:
            _, entry, queue = ends[0]
            block_id = entry & _ID_MASK
            if live.get(block_id) == entry:
                self._run_queue = queue
                self._run_used_s = self._records.used_s.item(self._record_of.item(block_id))
                self._run_stamp = entry >> _ID_BITS
                return block_id
            heappop(ends)
            if entry in self._shown.get(queue, ()):
                self._show_ends(queue)
        raise AssertionError("a candidate is in no queue")

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        """Drop the block; if it was evicted, keep its record."""
        if self._unclassified is not None:
            self._classify_prompt()
        self.withdraw(block_id)
        self._prompts.pop(block_id, None)
        self._records.leave(self._record_of.item(block_id), remember=evicted)
        if self._records.num_dropped >= _MAX_DROPPED:  # too little is reused for a fit
            self._model.censor(self._records.take_dropped(), now)
        if evicted:
            self._capacity = self._records.num_resident

    def _hold(self, block_id: int) -> None:
        """Keep a candidate out of the queues: it follows the last victim.

        Eviction goes up a prompt's chain. A block of the last victim's class that was used together with it
        has the same value, or less if shallow blocks cost less, so it is the next victim.
        """
        if self._held >= 0:
            self._enqueue_held()
        self._held = block_id

    def _enqueue_held(self) -> None:
        """Put the held candidate in its queue like any other."""
        block_id, self._held = self._held, -1
        self._enqueue(self._live[block_id], self._records.queues.item(self._record_of.item(block_id)))

    def _enqueue(self, entry: int, queue: int) -> None:
        ends = self._queues.get(queue)
        if ends is None:
            ends = self._queues[queue] = ([], [])
        heappush(ends[0], entry)
        ends[1].append(entry)
        self._num_entries += 2
        heappush(self._ends, (self._rank(entry, queue), entry, queue))

    def _advance(self, now: float) -> None:
        self._run_queue = -1
        self._now = now
        if self._first_s is None:
            self._first_s = now

    def _pause(self, records: Int32, now: float) -> int:
        """Return the level of the pause before these blocks are used now; learn what tools took."""
        pause_s = now - self._records.used_s.item(records[-1])
        self._paces.learn(self._records.tools.item(records[-1]), pause_s)
        return pause_level(pause_s)

    def _end_lifetimes(self, records: Int32, now: float) -> None:
        table = self._records
        if table.has_hints:
            self._judge_hints(records, now, are_reused=True)
        if table.has_left:
            self._sessions.reused(records, now)
        self._model.learn(table.classes[records], table.used_s[records], table.weights[records], now)

    def _judge_hints(self, records: Int32, now: float, *, are_reused: bool) -> None:
        """Count what was expected of those that have hints since they were counted last, and their reuses."""
        table = self._records
        hinted = records[table.hints[records] > 0]
        if not len(hinted) or not self._model.is_fitted:
            return
        classes, used_s, weights = table.classes[hinted], table.used_s[hinted], table.weights[hinted]
        expected = self._model.expected_between(classes, self._judged_s - used_s, now - used_s)
        levels = table.hint_levels(hinted)
        self._trust.expect(levels, weights * expected)
        if are_reused:
            self._trust.reused(levels, weights)

    def _leave(self, records: Int32) -> None:
        """Rank blocks, a chain from the root, as left ones, if that makes a difference."""
        if not len(records) or self._sessions.factor == 1.0:
            return
        table = self._records
        table.queues[records] = table.queues[records] % _LEFT + _LEFT
        block_ids = table.blocks[records]
        held = block_ids[self._record_of[block_ids] == records]
        if len(held) and (tail := held.item(-1)) in self._live:
            self.withdraw(tail)
            self.offer(tail)

    def _start_lifetimes(self, records: Int32, number: int, now: float) -> None:
        table = self._records
        table.counts[records] += 1
        table.used_s[records] = now
        table.users[records] = number
        table.tools[records] = 0
        if table.has_left:
            table.left_s[records] = math.inf
            table.queues[records] %= _LEFT

    def _note_prompt(self, tail: int, chain: Int32, pause: int, number: int) -> None:
        """Record the chain of a prompt, which may still grow after `tail`."""
        self._unclassified = (tail, chain, pause)
        self._prompts_until_fit -= 1
        self._prompts[tail] = (chain, pause, number)
        if len(self._prompts) > _MAX_OPEN_PROMPTS:
            self._prompts.popitem(last=False)
        if tail in self._live:
            self.withdraw(tail)
            self.offer(tail)

    def _classify_prompt(self) -> None:
        """Classify the blocks of the prompt used last."""
        if self._unclassified is None:
            return
        _, chain, pause = self._unclassified
        self._unclassified = None
        self._records.pauses[chain] = pause
        self._classify(chain, pause)

    def _classify(
        self,
        chain: Int32,
        pause: int,
        conclusion: Conclusion = NO_CONCLUSION,
        chosen: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Set the classes of a prompt's blocks, or of the chosen ones of them."""
        table = self._records
        num_blocks = table.depths.item(chain[-1]) + 1
        pace = self._paces.level(self._paces.number_of(conclusion.tools))
        classes = classify(table.counts[chain], num_blocks, pause, conclusion, pace)
        if chosen is not None:
            chain, classes = chain[chosen], classes[chosen]
        table.classes[chain] = classes
        queues = classes + table.hints[chain] * NUM_CLASSES if table.has_hints else classes
        if table.has_left:
            queues = queues + table.queues[chain] // _LEFT * _LEFT
        table.queues[chain] = queues
        table.weights[chain] = num_blocks**-0.5

    def _start_shadows(self) -> Shadows:
        """Start the comparison: the order was LRU so far, so both hold what the cache does."""
        table = self._records
        shadows = Shadows(table, self._model, table.num_resident)
        resident = table.resident()
        order = np.lexsort((table.depths[resident], -table.used_s[resident]))
        shadows.fill(resident[order].astype(np.int32))
        return shadows

    def _fit(self, now: float) -> None:
        assert self._first_s is not None
        span = now - self._first_s
        self._next_fit_s = now + min(max(span * _FIT_SHARE, _MIN_FIT_S), _MAX_FIT_S)
        self._prompts_until_fit = _MIN_FIT_PROMPTS
        if self._model.num_reuses >= _MIN_REUSES and span >= _MIN_SPAN_S:
            if self._records.has_hints:
                self._judge_hints(self._records.hinted(), now, are_reused=False)
                self._trust.judge(self._model.prior_weight, now)
            if self._records.has_left:
                self._sessions.judge(now)
            self._judged_s = now
            self._model.censor(self._records.take_dropped(), now)
            self._model.fit(self._records.open_lifetimes(), now)
            self._ranked_s = -math.inf
            if self._shadows is None:
                self._shadows = self._start_shadows()

    def _rank(self, entry: int, queue: int) -> float:
        """Return the candidate's current value; the lowest is evicted first."""
        if queue >= NUM_CLASSES:
            return self._rank_hinted(entry, queue)
        if not self._learned:
            return entry >> _ID_BITS
        table = self._records
        record = self._record_of.item(entry & _ID_MASK)
        used_s = table.used_s.item(record)
        if used_s != self._rank_cache[1] or queue != self._rank_cache[0]:
            # Blocks of one prompt follow each other, and only their costs differ.
            worth = self._model.value_of(queue, self._now - used_s)
            self._rank_cache = (queue, used_s, worth)
        return self._rank_cache[2] * table.costs.item(record)

    def _rank_hinted(self, entry: int, queue: int) -> float:
        """Return the rank of a block with retention hints, or that its session left."""
        record = self._record_of.item(entry & _ID_MASK)
        hint = self._records.hint(queue % _LEFT // NUM_CLASSES)
        if self._now - self._records.used_s.item(record) > hint.ttl_s:
            return -1.0
        worth = self._rank(entry, queue % NUM_CLASSES) * self._trust.factor(hint.level)
        return worth * self._sessions.factor if queue >= _LEFT else worth

    def _rank_ends(self) -> None:
        """Recompute the ranks of the ends of all queues."""
        self._ranked_s = self._now
        self._ends = []
        self._shown.clear()
        self._run_queue = -1
        self._rank_cache = (-1, -1.0, 0.0)
        for queue in list(self._queues):
            self._show_ends(queue)

    def _show_ends(self, queue: int) -> None:
        """Enter the two ends of a queue in the heap of ends, unless they are there."""
        ends = self._queues.get(queue)
        if ends is None:
            return
        oldest, newest = ends
        live = self._live
        num_entries = len(oldest) + len(newest)
        while oldest and live.get(oldest[0] & _ID_MASK) != oldest[0]:
            heappop(oldest)
        while newest and live.get(newest[-1] & _ID_MASK) != newest[-1]:
            newest.pop()
        self._num_entries -= num_entries - len(oldest) - len(newest)
        if not oldest or not newest:
            # Both hold every live entry of the queue, so neither has any.
            self._num_entries -= len(oldest) + len(newest)
            del self._queues[queue]
            self._shown.pop(queue, None)
            return
        shown = self._shown.get(queue, (-1, -1))
        pair = (oldest[0], newest[-1])
        self._shown[queue] = pair
        for entry in dict.fromkeys(pair):
            if entry not in shown:
                heappush(self._ends, (self._rank(entry, queue), entry, queue))

    def _rebuild_queues(self) -> None:
        """Drop stale entries."""
        self._queues.clear()
        self._held = -1
        for block_id, entry in self._live.items():
            queue = self._records.queues.item(self._record_of.item(block_id))
            ends = self._queues.setdefault(queue, ([], []))
            ends[1].append(entry)
        for oldest, newest in self._queues.values():
            newest.sort()
            oldest.extend(newest)
        self._num_entries = 2 * len(self._live)
        self._rank_ends()

    def _resize(self, num_ids: int) -> None:
        super()._resize(num_ids)
        self._record_of = resized(self._record_of, num_ids)
