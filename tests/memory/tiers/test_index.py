from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.prefix.failing_policy import FailingPolicy

from stemma.memory.tiers.index import TierIndex
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import DEFAULT_TRAITS
from stemma.types import BlockKey

CAPACITY = 6
KEYS = [BlockKey(hashlib.sha256(bytes([n])).digest()) for n in range(16)]
NUMBERS = st.integers(0, len(KEYS) - 1)


class TierIndexMachine(RuleBasedStateMachine):
    """Random traffic against a plain dict. Key n hangs below key (n - 1) // 2: a binary tree."""

    max_policy_failures = 0

    def __init__(self) -> None:
        super().__init__()
        self.policy = FailingPolicy(LRUPolicy())
        self.index = TierIndex(CAPACITY, self.policy)
        self.model: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.duplicates: list[int] = []
        self.now = 0.0

    def leaves(self) -> set[int]:
        parents = {(n - 1) // 2 for n in self.model}
        return {n for n in self.model if n not in parents and not self.pins.get(n)}

    def gone(self, n: int) -> None:
        del self.model[n]
        self.duplicates = [m for m in self.duplicates if m != n]

    @rule(n=NUMBERS)
    def put(self, n: int) -> None:
        self.now += 1
        if n in self.model:
            return
        slot = self.index.reserve()
        if slot is None:
            before = dict(self.model)
            evicted = self.index.evict(self.now)
            duplicates = [m for m in self.duplicates if not self.pins.get(m)]
            if evicted is None:
                assert not self.leaves()
                assert not duplicates
                return
            gone = next(m for m, held in before.items() if held == evicted)
            assert gone == duplicates[-1] if duplicates else gone in self.leaves()
            self.gone(gone)
            slot = self.index.reserve()
            assert slot is not None
        parent = KEYS[(n - 1) // 2] if n else BlockKey(bytes(32))
        self.index.commit(slot, KEYS[n], parent, self.now, DEFAULT_TRAITS)
        self.model[n] = slot

    @rule(n=NUMBERS)
    def failed_write(self, n: int) -> None:
        slot = self.index.reserve()
        if slot is not None:
            self.index.free(slot)

    @rule(n=NUMBERS)
    def touch(self, n: int) -> None:
        if n in self.model:
            self.index.touch([self.model[n]], self.now)

    @rule(n=NUMBERS)
    def pin(self, n: int) -> None:
        if n in self.model:
            self.index.pin(KEYS[n])
            self.pins[n] = self.pins.get(n, 0) + 1

    @rule(n=NUMBERS)
    def unpin(self, n: int) -> None:
        if self.pins.get(n):
            self.index.unpin(KEYS[n])
            self.pins[n] -= 1
            if not self.pins[n] and n in self.duplicates:
                self.mark(n)

    @rule(n=NUMBERS)
    def mark(self, n: int) -> None:
        self.index.mark_duplicates([KEYS[n]])
        self.duplicates = [m for m in self.duplicates if m != n] + [n] * (n in self.model)

    @rule(n=NUMBERS)
    def unmark(self, n: int) -> None:
        self.index.unmark_duplicates([KEYS[n]])
        self.duplicates = [m for m in self.duplicates if m != n]

    @rule()
    def evict_duplicate(self) -> None:
        evicted = self.index.evict_duplicate(self.now)
        duplicates = [m for m in self.duplicates if not self.pins.get(m)]
        if duplicates:
            assert evicted == self.model[duplicates[-1]]
            self.gone(duplicates[-1])
        else:
            assert evicted is None

    @rule(n=NUMBERS)
    def drop(self, n: int) -> None:
        if n in self.model:
            self.index.drop(self.model[n], self.now)
            self.gone(n)

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.model) <= CAPACITY
        assert {n: self.index.find(KEYS[n]) for n in self.model} == self.model
        assert self.index.num_duplicates == len(self.duplicates)
        assert self.index.num_policy_failures <= self.max_policy_failures

    def teardown(self) -> None:
        """Everything that nobody pins can be evicted."""
        for n, count in self.pins.items():
            for _ in range(count):
                self.index.unpin(KEYS[n])
        while self.index.evict(self.now) is not None:
            pass
        assert len(self.index) == 0


class FailingPolicyMachine(TierIndexMachine):
    """The policy raises at its n-th call; nothing else may notice."""

    max_policy_failures = 1

    @initialize(num_calls=st.integers(0, 60), acts_first=st.booleans())
    def fail_at(self, num_calls: int, acts_first: bool) -> None:
        self.policy.arm(num_calls, acts_first=acts_first)


for _machine in (TierIndexMachine, FailingPolicyMachine):
    _machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTierIndex = TierIndexMachine.TestCase
TestPolicyThatRaises = FailingPolicyMachine.TestCase


def test_the_policy_never_offers_a_parent_or_a_pinned_block() -> None:
    index = TierIndex(3, LRUPolicy())
    for n, parent in ((0, BlockKey(bytes(32))), (1, KEYS[0]), (2, KEYS[1])):
        slot = index.reserve()
        assert slot is not None
        index.commit(slot, KEYS[n], parent, float(n), DEFAULT_TRAITS)
    index.pin(KEYS[2])
    assert index.evict(9.0) is None
    index.unpin(KEYS[2])
    assert [index.evict(9.0) for _ in range(4)] == [2, 1, 0, None]


def test_restore_keeps_the_order_of_use() -> None:
    index = TierIndex(4, LRUPolicy())
    index.restore([2, 0], [KEYS[5], KEYS[6]], [KEYS[0], KEYS[0]], np.array([-1, -1]), 1.0, DEFAULT_TRAITS)
    index.check()
    assert index.num_opened == 3
    assert index.evict(2.0) == 0
    assert index.reserve() == 0
    assert index.reserve() == 1
