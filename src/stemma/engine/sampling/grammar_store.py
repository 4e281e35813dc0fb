"""Compiled grammars in memory: those that requests use, and the latest that they used, bounded by bytes.

What a grammar holds is mostly its lexer's states. llguidance makes them while masks are computed, shares
them between the sequences of a grammar and doesn't tell their number. So they are estimated from the time
that slow masks took: making states is what makes a mask slow (docs/project/decisions.md has the measurement).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakValueDictionary

from stemma.budgets import TENANT_SHARE, Budget

BASE_BYTES = 128 * 1024
BYTES_PER_CHAR = 160
"""Bytes of the parser's tables for a character of the grammar's text."""
SLOW_S = 2e-4
"""A mask that is found among known states takes a tenth of this."""
BYTES_PER_S = 256 * 2**20
"""States that llguidance makes in a second, in bytes: the most that was measured."""
MOST_BYTES = 64 * 2**20
"""Bytes that one grammar may hold by the limits that llguidance is given."""


class LexerSize:
    """An upper estimate of what one grammar holds. The step loop adds to it, others read it."""

    __slots__ = ("_base", "_seconds")

    def __init__(self, num_chars: int) -> None:
        """`num_chars`: length of the grammar's text."""
        self._base = BASE_BYTES + BYTES_PER_CHAR * num_chars
        self._seconds = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes that the lexer is reckoned to hold."""
        return min(MOST_BYTES, self._base + int(BYTES_PER_S * self._seconds))

    def compute_mask(self, matcher: Any, address: int, num_bytes: int) -> None:
        """Let llguidance write the mask at `address`, and count the states that it made."""
        begun = perf_counter()
        matcher.unsafe_compute_mask_ptr(address, num_bytes)
        spent = perf_counter() - begun
        if spent > SLOW_S:
            self._seconds += spent


class Sized(Protocol):
    """A compiled grammar."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""


StoreKey = tuple[str, ...]
"""The owner (tenant), then what the grammar was compiled from: tenants don't learn of each other's."""


class GrammarStore:
    """Finds every grammar that is in use, and remembers others as long as all fit the budget. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.budget = Budget(
            "grammar_bytes", "bytes of compiled grammars", max_bytes, int(TENANT_SHARE * max_bytes)
        )
        self._alive: WeakValueDictionary[StoreKey, Any] = WeakValueDictionary()
        self._remembered: OrderedDict[StoreKey, Sized] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: StoreKey) -> Any | None:
        """Return the grammar of `key`, if there is one."""
        with self._lock:
            found = self._alive.get(key)
            if found is not None:
                self._remembered[key] = found
                self._remembered.move_to_end(key)
            return found

    def make_room(self, num_bytes: int, owner: str) -> None:
        """Forget grammars nobody uses until another of `num_bytes` fits, oldest first.

        Raises RateLimited or Overloaded if those in use leave no room.
        """
        with self._lock:
            self._forget(num_bytes, owner)
            self.budget.check(num_bytes, owner)

    def keep(self, key: StoreKey, grammar: Sized) -> None:
        """Remember a grammar, and forget what doesn't fit beside it any more."""
        with self._lock:
            self._alive[key] = grammar
            self._remembered[key] = grammar
            self._remembered.move_to_end(key)
            self._forget(0, key[0])

    def _forget(self, num_bytes: int, owner: str) -> None:
        held = self._measure()
        most = self.budget.most(owner)
        if owner and held.get(owner, 0) + num_bytes > most:
            for key in [key for key in self._remembered if key[0] == owner]:
                if held.get(owner, 0) + num_bytes <= most:
                    break
                del self._remembered[key]
                held = self._measure()
        while self._remembered and sum(held.values()) + num_bytes > self.budget.limit:
            self._remembered.popitem(last=False)
            held = self._measure()

    def _measure(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for key, grammar in self._alive.items():
            held[key[0]] = held.get(key[0], 0) + grammar.num_bytes
        self.budget.measured(held)
        return held
