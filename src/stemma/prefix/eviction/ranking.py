"""A policy that is asked about single things, with quotas of their owners around it; LRU once it fails.

A prefix index does this for its blocks, where the structure says what may leave. Here everything may leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from stemma.prefix.eviction.fallback import fall_back
from stemma.prefix.eviction.policy import BlockTraits, Conclusion, EvictionPolicy
from stemma.prefix.eviction.quotas import QuotaPolicy
from stemma.types import BlockIds


def _one(number: int) -> BlockIds:
    return np.array([number], dtype=np.int32)


class Ranking:
    """Says which of the things entered goes first. They have small numbers, which may be used again."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._owners: dict[int, str] = {}
        """Of all that are in, those entered first first."""
        self._aside: set[int] = set()
        self._quotas: Mapping[str, int] = {}

    @property
    def num_over_quota(self) -> int:
        """How many may leave now whose owners have too many."""
        return self._policy.num_over if isinstance(self._policy, QuotaPolicy) else 0

    def enter(self, number: int, now: float, traits: BlockTraits) -> None:
        """Rank one more; what it is a continuation of (`traits.after`) must be in, or -1."""
        self._owners[number] = traits.owner

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
        del self._owners[number]
        self._tell(lambda policy: policy.drop(number, now, evicted=evicted))

    def first(self, now: float, may_leave: Callable[[int], bool], *, over_quota: bool = False) -> int | None:
        """Return what goes first of all that `may_leave`; with `over_quota`, of owners that have too many."""
        try:
            while not over_quota or self.num_over_quota:
                number = self._victim(now)
                if number is None or may_leave(number):
                    return number
                self._aside.add(number)
                self._tell(lambda policy, number=number: policy.withdraw(number))  # type: ignore[misc]
            return None
        finally:
            aside, self._aside = self._aside, set()
            for number in aside:
                self._tell(lambda policy, number=number: policy.offer(number))  # type: ignore[misc]

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Set how many each owner may have; others have any number. Nothing leaves by this. O(n)."""
        self._quotas = dict(quotas)
        base = self._policy.base if isinstance(self._policy, QuotaPolicy) else self._policy
        self._policy = base
        if quotas:
            policy = self._policy = QuotaPolicy(base, quotas)
            for number, owner in self._owners.items():
                policy.adopt(_one(number), BlockTraits(owner=owner), 0.0)
                if number not in self._aside:
                    policy.adopt_candidate(number)

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
        base = self._policy.base if isinstance(self._policy, QuotaPolicy) else self._policy
        self._policy = fall_back(base, error, self._owners, set(self._owners) - self._aside)
        self.set_quotas(self._quotas)
