"""Budgets: what strangers make a process hold or compute, bounded over all of them and for each tenant.

Who takes from a budget gives back; who would exceed it gets one of two errors, both worth a retry:
`RateLimited` if the owner's share is used up, `Overloaded` if the budget of all is. Used by the engine
(compiled grammars) and by the server, whose `server/door` lists them all.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from stemma.errors import Overloaded, RateLimited

TENANT_SHARE = 0.5
"""Part of a budget that one tenant may hold."""
RETRY_AFTER_S = 1.0
"""Seconds told to a client where nobody knows when something is given back."""


@dataclass(frozen=True, slots=True)
class BudgetState:
    """A budget at one moment."""

    name: str
    unit: str
    held: int
    limit: int
    share: int | None
    """The most that one owner may hold; None: there is no such bound."""
    num_refused: int
    """Times that all of it was held."""
    num_refused_shares: int
    """Times that an owner's share was held."""


class Budget:
    """`limit` units of something. Thread-safe. The owner "" stands for everybody and has no share."""

    def __init__(self, name: str, unit: str, limit: int, share: int | None = None) -> None:
        """`name` and `unit` are for messages and metrics, e.g. ``body_bytes`` and ``bytes of bodies``."""
        self.name, self.unit, self.limit, self.share = name, unit, limit, share
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._total = 0
        self._num_refused = 0
        self._num_refused_shares = 0

    def most(self, owner: str = "") -> int:
        """Return what `owner` may hold at most."""
        return self.limit if self.share is None or not owner else min(self.limit, self.share)

    def take(self, amount: int, owner: str = "", *, retry_after_s: float = RETRY_AFTER_S) -> None:
        """Take `amount` units. Raises RateLimited or Overloaded; then nothing is taken."""
        with self._lock:
            self._check(amount, owner, retry_after_s)
            self._total += amount
            self._held[owner] += amount

    def add(self, amount: int, owner: str = "") -> None:
        """Count what is there already, whether there is room for it or not."""
        with self._lock:
            self._total += amount
            self._held[owner] += amount

    def give_back(self, amount: int, owner: str = "") -> None:
        """Return what was taken."""
        with self._lock:
            self._total -= amount
            self._held[owner] -= amount
            if self._held[owner] <= 0:
                del self._held[owner]

    @contextmanager
    def taken(self, amount: int, owner: str = "") -> Iterator[None]:
        """Hold `amount` units meanwhile. Raises as `take` does."""
        self.take(amount, owner)
        try:
            yield
        finally:
            self.give_back(amount, owner)

    def measured(self, held: Mapping[str, int]) -> None:
        """Replace what every owner holds, where it is measured and not taken."""
        with self._lock:
            self._held = Counter(held)
            self._total = sum(held.values())

    def check(self, amount: int, owner: str = "") -> None:
        """Raise as `take` does, and take nothing."""
        with self._lock:
            self._check(amount, owner, RETRY_AFTER_S)

    def held(self, owner: str | None = None) -> int:
        """Return what `owner` holds; None: all of them together."""
        return self._total if owner is None else self._held[owner]

    def state(self) -> BudgetState:
        """Return what is held and what was refused."""
        with self._lock:
            return BudgetState(
                self.name,
                self.unit,
                self._total,
                self.limit,
                self.share,
                self._num_refused,
                self._num_refused_shares,
            )

    def _check(self, amount: int, owner: str, retry_after_s: float) -> None:
        if owner and self.share is not None and self._held[owner] + amount > self.share:
            self._num_refused_shares += 1
            raise RateLimited(
                f"you hold {self._held[owner]} of the {self.share} {self.unit} that one tenant may hold; "
                "try again later",
                retry_after_s,
            )
        if self._total + amount > self.limit:
            self._num_refused += 1
            raise Overloaded(
                f"{self._total} of the server's {self.limit} {self.unit} are in use; try again later",
                retry_after_s=retry_after_s,
            )


class Holding:
    """The units that one request has taken, of several budgets; `close` returns all of them. For one
    thread."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: list[tuple[Budget, int, str]] = []

    def take(self, budget: Budget, amount: int, owner: str = "") -> None:
        """Take from `budget` until `close`. Raises as `Budget.take` does."""
        budget.take(amount, owner)
        self._taken.append((budget, amount, owner))

    def close(self) -> None:
        """Return everything; a second call does nothing."""
        while self._taken:
            budget, amount, owner = self._taken.pop()
            budget.give_back(amount, owner)
