"""Stored responses and conversations: limited in number, bytes and time, and separate by owner."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import orjson
from starlette.requests import Request

from stemma.types import TokenArray, as_tokens

_ENTRY_BYTES = 1024
"""Bytes of an entry in addition to its texts and tokens."""


Item = dict[str, Any]
"""An item of OpenAI's Responses: a message, a call, its output."""


class StoreEntry(Protocol):
    """An entry of a store."""

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""


E = TypeVar("E", bound=StoreEntry)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and the conversation that it ends."""

    response: bytes
    """The response as JSON."""
    messages: bytes
    """The chat's messages without instructions, the answer included, as JSON."""
    token_ids: TokenArray
    """The conversation as the engine holds it: prompt and answer."""
    input_items: bytes = b"[]"
    """Items that the answer was given to, those of earlier turns included, as JSON."""

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""
        texts = len(self.response) + len(self.messages) + len(self.input_items)
        return texts + self.token_ids.nbytes + _ENTRY_BYTES

    def history(self) -> list[dict[str, Any]]:
        """Return the messages."""
        messages: list[dict[str, Any]] = orjson.loads(self.messages)
        return messages

    def items(self) -> list[Item]:
        """Return the items that the answer was given to, and those of the answer."""
        given: list[Item] = orjson.loads(self.input_items)
        return [*given, *orjson.loads(self.response)["output"]]


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation that its client names: items, and what the client notes beside them."""

    created_at: int
    metadata: bytes = b"{}"
    """As JSON."""
    item_list: bytes = b"[]"
    """As JSON."""
    token_ids: TokenArray = field(default_factory=lambda: as_tokens([]))
    """The conversation as the engine held it when its last answer ended; empty before the first."""

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""
        return len(self.metadata) + len(self.item_list) + self.token_ids.nbytes + _ENTRY_BYTES

    def items(self) -> list[Item]:
        """Return the items, oldest first."""
        items: list[Item] = orjson.loads(self.item_list)
        return items


@dataclass(slots=True)
class _Owned(Generic[E]):
    """The entries of one owner, least recently used first."""

    entries: OrderedDict[str, tuple[float, E]]
    num_bytes: int = 0


class OwnedStore(Generic[E]):
    """Keeps up to `capacity` entries, `capacity_bytes` in all, each until `ttl_s` after its last use.

    For one event loop. To make room, the least recently used entry of the owner that holds most is
    dropped, so that no owner can displace the entries of others. `clock` is in seconds.
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
        self._owners: dict[str, _Owned[E]] = {}
        self.num_entries = 0
        self.num_bytes = 0

    def put(self, owner: str, entry_id: str, entry: E) -> bool:
        """Keep `entry`; return False if it alone is too large."""
        if entry.num_bytes > self._capacity_bytes or self.capacity == 0:
            return False
        self.delete(owner, entry_id)
        self._drop_expired()
        while self.num_entries >= self.capacity or self.num_bytes + entry.num_bytes > self._capacity_bytes:
            largest = max(self._owners, key=lambda name: self._owners[name].num_bytes)
            self._drop(largest, next(iter(self._owners[largest].entries)))
        owned = self._owners.setdefault(owner, _Owned(OrderedDict()))
        owned.entries[entry_id] = (self._clock() + self.ttl_s, entry)
        owned.num_bytes += entry.num_bytes
        self.num_entries += 1
        self.num_bytes += entry.num_bytes
        return True

    def get(self, owner: str, entry_id: str) -> E | None:
        """Return the entry and restart its time to live; None if `owner` has none of this id."""
        self._drop_expired()
        owned = self._owners.get(owner)
        found = None if owned is None else owned.entries.get(entry_id)
        if owned is None or found is None:
            return None
        owned.entries[entry_id] = (self._clock() + self.ttl_s, found[1])
        owned.entries.move_to_end(entry_id)
        return found[1]

    def delete(self, owner: str, entry_id: str) -> bool:
        """Drop the entry; return whether `owner` had it."""
        self._drop_expired()
        owned = self._owners.get(owner)
        if owned is None or entry_id not in owned.entries:
            return False
        self._drop(owner, entry_id)
        return True

    def _drop_expired(self) -> None:
        """Drop expired entries; the order of last use is also the order of expiry."""
        now = self._clock()
        for owner in list(self._owners):
            entries = self._owners[owner].entries
            while entries and (first := next(iter(entries.items())))[1][0] <= now:
                self._drop(owner, first[0])

    def _drop(self, owner: str, entry_id: str) -> None:
        owned = self._owners[owner]
        _, entry = owned.entries.pop(entry_id)
        owned.num_bytes -= entry.num_bytes
        self.num_entries -= 1
        self.num_bytes -= entry.num_bytes
        if not owned.entries:
            del self._owners[owner]


@dataclass(frozen=True, slots=True)
class Stores:
    """All that one server keeps for its clients; lives in ``app.state.stores``."""

    responses: OwnedStore[StoredResponse]
    conversations: OwnedStore[StoredConversation]


def stores_of(request: Request) -> Stores:
    """Return what the app that serves `request` keeps."""
    stores: Stores = request.app.state.stores
    return stores
