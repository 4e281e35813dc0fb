"""Blocks of conversations that are likely to come back, loaded to the device while nobody waits.

Where an answer ended with a tool call or the end of a turn, its conversation is noted. It is due when the
first tenth of those that ended so had come back, as learned from those that did. Then, as long as there is no
request, its blocks in lower tiers are loaded a few at a time, within so many bytes a second.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stemma.memory.cache.lease import Lease
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.prefix.eviction.policy import Conclusion, Ending
from stemma.prefix.keys import Namespace
from stemma.types import TokenArray

MAX_NOTES = 256
"""Conversations that may come back; a new one takes the place of the oldest."""
_FIRST_GUESS_S = {Ending.TOOL: 2.0, Ending.TURN: 10.0}
"""When a conversation is due as long as too few have come back."""
_EARLY_SHARE = 0.1
"""Share of conversations that may come back before they are due."""
_MIN_LEARNED, _MAX_LEARNED = 10, 256
_SLICE_BLOCKS = 32
"""Blocks of one load: what a request that comes meanwhile may have to wait for at most."""
_MAX_DEVICE_SHARE = 4
"""One part in so many of the device's blocks may have been loaded ahead and not be used yet."""
_SAVED_UP_S = 1.0
"""Time whose bytes may be loaded at once."""
_POLL_S = 0.005
_OPENING_TOKENS = 8
"""Last tokens of a prompt, which may open its answer: the next turn needn't have them."""


@dataclass(eq=False, slots=True)
class _Note:
    namespace: Namespace
    tokens: TokenArray
    num_head: int
    """Leading tokens that the next turn surely has."""
    ending: Ending
    ended_s: float
    is_loaded: bool = False
    """Nothing is left to load of it, or it can't be."""

    def goes_on_in(self, namespace: Namespace, tokens: TokenArray) -> bool:
        """Return whether a prompt is a later turn of this conversation."""
        size = self.num_head
        if size >= len(tokens) or namespace != self.namespace:
            return False
        end = max(0, size - 4 * _OPENING_TOKENS)  # most others differ here
        return np.array_equal(tokens[end:size], self.tokens[end:size]) and np.array_equal(
            tokens[:end], self.tokens[:end]
        )


class _Delays:
    """How soon conversations came back, of the last that did."""

    def __init__(self, first_guess_s: float) -> None:
        self._guess_s = first_guess_s
        self._recent: deque[float] = deque(maxlen=_MAX_LEARNED)
        self._sorted: list[float] = []

    def learn(self, delay_s: float) -> None:
        """Note a turn that came back, and after how long."""
        if len(self._recent) == _MAX_LEARNED:
            self._sorted.remove(self._recent[0])
        self._recent.append(delay_s)
        insort(self._sorted, delay_s)

    @property
    def early_s(self) -> float:
        """The delay that few of them fell short of."""
        if len(self._sorted) < _MIN_LEARNED:
            return self._guess_s
        return self._sorted[int(_EARLY_SHARE * len(self._sorted))]


class ReturnLoads:
    """Loads ahead of turns. Not thread-safe: one owner, the step loop."""

    def __init__(
        self, cache: PrefixCache, bandwidth: int, block_bytes: int, clock: Callable[[], float]
    ) -> None:
        """`bandwidth`: bytes a second, 0: nothing is noted or loaded."""
        self._cache = cache
        self._bandwidth, self._block_bytes, self._clock = bandwidth, block_bytes, clock
        self._most_bytes = max(_SAVED_UP_S * bandwidth, float(block_bytes))
        self._bytes_left, self._refilled_s = self._most_bytes, clock()
        self._notes: deque[_Note] = deque(maxlen=MAX_NOTES)
        self._delays = {ending: _Delays(guess_s) for ending, guess_s in _FIRST_GUESS_S.items()}
        self._loading: tuple[_Note, Lease, int] | None = None
        """The conversation, and the lease and the number of the blocks that are on their way."""

    def conclude(self, namespace: Namespace, tokens: TokenArray, conclusion: Conclusion) -> None:
        """Note a conversation, prompt and answer, if it may come back."""
        if not self._bandwidth or conclusion.ending not in self._delays:
            return
        num_head = len(tokens) - conclusion.num_output_tokens - _OPENING_TOKENS
        if num_head > 0:
            self._notes.append(_Note(namespace, tokens, num_head, conclusion.ending, self._clock()))

    def arrived(self, namespace: Namespace, tokens: TokenArray) -> None:
        """Learn from a request how soon its conversation came back, which is no longer waited for."""
        for note in [note for note in self._notes if note.goes_on_in(namespace, tokens)]:
            self._notes.remove(note)
            self._delays[note.ending].learn(self._clock() - note.ended_s)

    def work(self) -> float | None:
        """Begin or end a load, if there is any to do; return in how many seconds to call again, None: never.

        Call it only while there is no request.
        """
        if self._loading is not None:
            if not self._loading[1].has_loaded:
                return _POLL_S
            self.stop()
        left = [note for note in self._notes if not note.is_loaded]
        if not left:
            return None
        note = min(left, key=self._due_s)
        due_s = self._due_s(note)
        now = self._clock()
        if due_s > now:
            return due_s - now
        return self._begin(note, now)

    def stop(self) -> None:
        """End the load under way, if there is one: a request comes. What arrived stays on the device."""
        if self._loading is None:
            return
        (note, lease, num_asked), self._loading = self._loading, None
        ended_itself = lease.has_loaded
        num_loaded = self._cache.end_load_ahead(lease)
        # What a tier couldn't deliver is left to the turn: it isn't asked for again and again.
        note.is_loaded |= ended_itself and num_loaded < num_asked

    def _begin(self, note: _Note, now: float) -> float:
        self._bytes_left += (now - self._refilled_s) * self._bandwidth
        self._bytes_left, self._refilled_s = min(self._bytes_left, self._most_bytes), now
        num_allowed = int(self._bytes_left // self._block_bytes)
        if not num_allowed:
            return (self._block_bytes - self._bytes_left) / self._bandwidth + _POLL_S
        room = self._cache.num_blocks // _MAX_DEVICE_SHARE - self._cache.num_waiting_ahead
        most = min(num_allowed, room, _SLICE_BLOCKS)
        lease = self._cache.load_ahead(note.namespace, note.tokens, most) if most > 0 else None
        if lease is None:
            note.is_loaded = True
            return 0.0
        assert lease.pending is not None
        num_asked = len(lease.pending.tiers)
        self._bytes_left -= num_asked * self._block_bytes
        self._loading = (note, lease, num_asked)
        return _POLL_S

    def _due_s(self, note: _Note) -> float:
        return note.ended_s + self._delays[note.ending].early_s
