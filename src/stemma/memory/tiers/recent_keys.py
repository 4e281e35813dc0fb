"""Recent notes about block keys, in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from stemma.types import BlockKey, Tier

V = TypeVar("V")
NOTE_BYTES = 250
"""Approximate bytes per key with its note."""


class RecentKeys(Generic[V]):
    """A bounded table by block key that drops the oldest notes. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Not a plain dict: repeatedly taking its oldest key costs O(keys deleted before).
        self._notes: OrderedDict[BlockKey, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._notes)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._notes

    def get(self, key: BlockKey, default: V) -> V:
        """Return the note of a key."""
        return self._notes.get(key, default)

    def note(self, notes: Mapping[BlockKey, V]) -> None:
        """Write or renew notes."""
        with self._lock:
            for key, value in notes.items():
                self._notes[key] = value
                self._notes.move_to_end(key)
            while len(self._notes) > self._capacity:
                self._notes.popitem(last=False)

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Drop the notes of some keys."""
        with self._lock:
            for key in keys:
                self._notes.pop(key, None)

    def clear(self) -> None:
        """Drop all notes."""
        with self._lock:
            self._notes.clear()


class Whereabouts:
    """Facts about where blocks are that only the worker threads can learn. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._origins = RecentKeys[Tier](capacity)
        """The tier from which a block was prefetched to the host tier; hits are credited to it."""
        self._in_pool = RecentKeys[bool](capacity)
        """Blocks seen in the pool, which is too slow to ask on the step loop."""

    def note_in_pool(self, keys: Iterable[BlockKey]) -> None:
        """Note that keys were seen in the pool, or are being written to it."""
        self._in_pool.note(dict.fromkeys(keys, True))

    def note_not_in_pool(self, keys: Iterable[BlockKey]) -> None:
        """Note that keys aren't in the pool (any more), or couldn't be put there."""
        self._in_pool.drop(keys)

    def note_origin(self, tier: Tier, keys: Iterable[BlockKey]) -> None:
        """Note that keys are being copied to the host tier from `tier`."""
        self._origins.note(dict.fromkeys(keys, tier))

    def drop_origin(self, keys: Iterable[BlockKey]) -> None:
        """Drop the origin of keys that were loaded directly from their tier to the device."""
        self._origins.drop(keys)

    def note_lost(self, key: BlockKey) -> None:
        """Drop all notes of a key that wasn't found where they said."""
        self._origins.drop([key])
        self._in_pool.drop([key])

    def is_in_pool(self, key: BlockKey) -> bool:
        """Return whether the pool was seen to have it."""
        return key in self._in_pool

    def origin(self, key: BlockKey, tier: Tier) -> Tier:
        """Return the tier that a block found in `tier` came from; a host block's origin is returned once."""
        if tier is not Tier.HOST or key not in self._origins:
            return tier
        found = self._origins.get(key, tier)
        self._origins.drop([key])
        return found

    def clear(self) -> None:
        """Drop all notes."""
        self._origins.clear()
        self._in_pool.clear()
