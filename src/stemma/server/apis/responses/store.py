"""Stored responses: limited in number, bytes and time, and separate by owner."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from stemma.types import TokenArray

_ENTRY_BYTES = 1024
"""Bytes of an entry in addition to its texts and tokens."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and the conversation that it ends."""

    response: bytes
    """The response as JSON."""
    messages: bytes
    """The chat's messages without instructions, the answer included, as JSON."""
    token_ids: TokenArray
    """The conversation as the engine holds it: prompt and answer."""

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""
        return len(self.response) + len(self.messages) + self.token_ids.nbytes + _ENTRY_BYTES

    def history(self) -> list[dict[str, Any]]:
        """Return the messages."""
        messages: list[dict[str, Any]] = orjson.loads(self.messages)
        return messages


@dataclass(slots=True)
class _Owned:
    """The responses of one owner, least recently used first."""

    entries: OrderedDict[str, tuple[float, StoredResponse]]
    num_bytes: int = 0


class ResponseStore:
    """Keeps up to `capacity` responses, `capacity_bytes` in all, each until `ttl_s` after its last use.

    For one event loop. To make room, the least recently used response of the owner that holds most is
    dropped, so that no owner can displace the responses of others. `clock` is in seconds.
    """

    def __init__(
        self,
        capacity: int,
        capacity_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self._capacity_bytes = capacity_bytes
        self.ttl_s = ttl_s
        self._clock = clock
        self._owners: dict[str, _Owned] = {}
        self.num_responses = 0
        self.num_bytes = 0

    def put(self, owner: str, response_id: str, entry: StoredResponse) -> bool:
        """Keep `entry`; return False if it alone is too large."""
        if entry.num_bytes > self._capacity_bytes or self.capacity == 0:
            return False
        self.delete(owner, response_id)
        self._drop_expired()
        while self.num_responses >= self.capacity or self.num_bytes + entry.num_bytes > self._capacity_bytes:
            largest = max(self._owners, key=lambda name: self._owners[name].num_bytes)
            self._drop(largest, next(iter(self._owners[largest].entries)))
        owned = self._owners.setdefault(owner, _Owned(OrderedDict()))
        owned.entries[response_id] = (self._clock() + self.ttl_s, entry)
        owned.num_bytes += entry.num_bytes
        self.num_responses += 1
        self.num_bytes += entry.num_bytes
        return True

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the response and restart its time to live; None if `owner` has none of this id."""
        self._drop_expired()
        owned = self._owners.get(owner)
        found = None if owned is None else owned.entries.get(response_id)
        if owned is None or found is None:
            return None
        owned.entries[response_id] = (self._clock() + self.ttl_s, found[1])
        owned.entries.move_to_end(response_id)
        return found[1]

    def delete(self, owner: str, response_id: str) -> bool:
        """Drop the response; return whether `owner` had it."""
        self._drop_expired()
        owned = self._owners.get(owner)
        if owned is None or response_id not in owned.entries:
            return False
        self._drop(owner, response_id)
        return True

    def _drop_expired(self) -> None:
        """Drop expired entries; the order of last use is also the order of expiry."""
        now = self._clock()
        for owner in list(self._owners):
            entries = self._owners[owner].entries
            while entries and (first := next(iter(entries.items())))[1][0] <= now:
                self._drop(owner, first[0])

    def _drop(self, owner: str, response_id: str) -> None:
        owned = self._owners[owner]
        _, entry = owned.entries.pop(response_id)
        owned.num_bytes -= entry.num_bytes
        self.num_responses -= 1
        self.num_bytes -= entry.num_bytes
        if not owned.entries:
            del self._owners[owner]
