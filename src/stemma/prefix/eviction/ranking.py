"""A policy that is asked about single things; LRU once it fails.

A prefix index does this for its blocks, where the structure says what may leave. Here everything may leave.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stemma.prefix.eviction.fallback import fall_back
from stemma.prefix.eviction.policy import BlockTraits, Conclusion, EvictionPolicy
from stemma.types import BlockIds


def _one(number: int) -> BlockIds:
    return np.array([number], dtype=np.int32)


class Ranking:
    """Says which of the things entered goes first. They have small numbers, which may be used again."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._entered: dict[int, None] = {}
        """All that are in, those entered first first."""
        self._aside: set[int] = set()

    def enter(self, number: int, now: float, traits: BlockTraits) -> None:
        """Rank one more; what it is a continuation of (`traits.after`) must be in, or -1."""
        self._entered[number] = None

        def entered(policy: EvictionPolicy) -> None:
            policy.insert(_one(number), now, traits)
            policy.offer(number)

        self._tell(entered)

    def use(self, number: int, now: float) -> None:
        """Note a use."""
        self._tell(lambda policy: policy.access(_one(number), now))

    def hint(self, number: int, now: float, traits: BlockTraits) -> None:
        """Let other retention hints hold."""

        def hinted(policy: EvictionPolicy) -> None:
            policy.withdraw(number)
            policy.hint(_one(number), now, traits)
            policy.offer(number)

        self._tell(hinted)

    def conclude(self, number: int, conclusion: Conclusion) -> None:
        """Note how the request ended that used this last."""
        self._tell(lambda policy: policy.conclude(_one(number), conclusion))

    def leave(self, number: int, now: float, *, evicted: bool) -> None:
        """Rank it no more."""
        del self._entered[number]
        self._tell(lambda policy: policy.drop(number, now, evicted=evicted))

    def first(self, now: float, may_leave: Callable[[int], bool]) -> int | None:
        """Return what goes first of all that `may_leave`."""
        try:
            while (number := self._victim(now)) is not None and not may_leave(number):
                self._aside.add(number)
                self._tell(lambda policy, number=number: policy.withdraw(number))  # type: ignore[misc]
            return number
        finally:
            aside, self._aside = self._aside, set()
            for number in aside:
                self._tell(lambda policy, number=number: policy.offer(number))  # type: ignore[misc]

    def _victim(self, now: float) -> int | None:
        try:
            return self._policy.victim(now)
        except Exception as error:  # noqa: BLE001 - LRU takes over
            self._fail(error)
            return self._policy.victim(now)

    def _tell(self, call: Callable[[EvictionPolicy], None]) -> None:
        try:
            call(self._policy)
        except Exception as error:  # noqa: BLE001 - LRU takes over, and knows everything that is in
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._policy = fall_back(self._policy, error, self._entered, set(self._entered) - self._aside)
