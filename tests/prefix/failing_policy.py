"""A policy that raises at a call that the test chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

from stemma.prefix.eviction.policy import BlockTraits, EvictionPolicy
from stemma.types import BlockIds

T = TypeVar("T")


class FailingPolicy(EvictionPolicy):
    """Passes calls on to another policy until one call raises OverflowError; so do all after it."""

    name: ClassVar[str] = "failing"

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.num_calls_left: int | None = None
        self.acts_first = False

    def arm(self, num_calls: int, *, acts_first: bool = False) -> None:
        """Raise after `num_calls` more calls; with `acts_first`, once the other policy has done its work."""
        self.num_calls_left, self.acts_first = num_calls, acts_first

    def _call(self, act: Callable[[], T]) -> T:
        if self.num_calls_left is None:
            return act()
        if self.num_calls_left > 0:
            self.num_calls_left -= 1
            return act()
        if self.acts_first:
            act()
        raise OverflowError("34, Numerical result out of range")

    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        self._call(lambda: self.policy.insert(block_ids, now, traits))

    def access(self, block_ids: BlockIds, now: float) -> None:
        self._call(lambda: self.policy.access(block_ids, now))

    def offer(self, block_id: int) -> None:
        self._call(lambda: self.policy.offer(block_id))

    def withdraw(self, block_id: int) -> None:
        self._call(lambda: self.policy.withdraw(block_id))

    def victim(self, now: float) -> int | None:
        return self._call(lambda: self.policy.victim(now))

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        self._call(lambda: self.policy.drop(block_id, now, evicted=evicted))
