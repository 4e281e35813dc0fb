"""Stateful test of PrefixCache over a buffer whose KV is a hash of the prefix.

Whatever requests do in whatever order, every token that a lease counts as computed has exactly the KV that
computing it would give: reuse can't be told from recomputing. `check()` runs after every step.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from tests.memory.buffers import HashBuffer
from tests.prefix.failing_policy import FailingPolicy

from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.hashed import HashIndex
from stemma.prefix.keys import KeySpace, Namespace
from stemma.prefix.radix import RadixIndex

NAMESPACES = (Namespace(), Namespace(salt="tenant"))
# Few distinct tokens: prompts part and meet again often.
TOKEN_LISTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class _Running:
    def __init__(self, lease) -> None:
        self.lease = lease
        self.num_computed = lease.num_cached_tokens


class CacheMachine(RuleBasedStateMachine):
    running = Bundle("running")
    block_size = 3
    num_blocks = 10
    max_policy_failures = 0

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.buffer = HashBuffer(self.num_blocks, self.block_size)
        key_space = KeySpace("model", "layout", self.block_size)
        self.cache = PrefixCache(self.buffer, self.make_index(key_space), key_space, clock=self.clock)
        self.alive: list[_Running] = []
        self.rested: list[tuple[Namespace, np.ndarray]] = []
        """Where requests ended that others may continue: namespace and computed tokens."""
        self.flights: list[list[tuple[_Running, int, np.ndarray, np.ndarray]]] = []
        """Steps under way: whose token they compute, its position, and the blocks with what lies in them."""

    def make_index(self, key_space: KeySpace):
        return RadixIndex(key_space.block_size)

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    @rule(target=running, ids=TOKEN_LISTS, namespace=st.sampled_from(NAMESPACES), num_new=st.integers(0, 4))
    def reserve(self, ids, namespace, num_new):
        tokens = np.array(ids, dtype=np.int32)
        matched = self.cache.match(namespace, tokens)
        assert matched < len(tokens)
        lease = self.cache.reserve(namespace, tokens, num_new)
        if lease is None:
            return None
        if not self.rested:
            assert lease.num_cached_tokens <= matched
        assert lease.capacity_tokens >= len(tokens) + num_new
        one = _Running(lease)
        self.alive.append(one)
        return one

    @rule(one=running, num_tokens=st.integers(1, 7), tail=st.booleans())
    def compute(self, one, num_tokens, tail):
        if one not in self.alive:
            return
        end = min(one.num_computed + num_tokens, one.lease.num_tokens)
        self.buffer.compute(one.lease, one.num_computed, end)
        one.num_computed = end
        self.cache.commit(one.lease, end, tail=tail)

    @rule(one=running, token=st.integers(0, 2))
    def append(self, one, token):
        if one in self.alive and self.cache.extend(one.lease, one.lease.num_tokens + 1):
            one.lease.buffer.extend([token])

    @rule(one=running, num_tokens=st.integers(1, 4))
    def compute_a_rejected_draft(self, one, num_tokens):
        """Rows behind the known tokens are written, and overwritten later."""
        if one not in self.alive or one.num_computed < one.lease.num_tokens:
            return
        known = one.lease.num_tokens
        if self.cache.extend(one.lease, known + num_tokens):
            for position in range(known, known + num_tokens):
                block = one.lease.block_table[position // self.block_size]
                self.buffer.data[block, position % self.block_size] = -1

    @rule(target=running, one=running)
    def fork(self, one):
        if one not in self.alive:
            return None
        lease = self.cache.fork(one.lease, one.num_computed)
        if lease is None:
            return None
        twin = _Running(lease)
        twin.num_computed = one.num_computed
        self.alive.append(twin)
        return twin

    @rule(one=consumes(running))
    def free(self, one):
        if one in self.alive:
            self.alive.remove(one)
            self.cache.free(one.lease, one.num_computed)

    @rule(one=consumes(running))
    def rest(self, one):
        if one in self.alive:
            self.alive.remove(one)
            self.rested.append((one.lease.namespace, one.lease.tokens[: one.num_computed].copy()))
            self.cache.rest(one.lease, one.num_computed)

    @rule(target=running, choice=st.integers(0, 7), token=st.integers(0, 2), num_new=st.integers(0, 4))
    def go_on(self, choice, token, num_new):
        """Continue one of the last to rest, perhaps not the first to do so, perhaps long after."""
        if not self.rested:
            return None
        namespace, tokens = self.rested[-1 - choice % len(self.rested)]
        return self.reserve([*tokens.tolist(), token], namespace, num_new)

    @rule()
    def end_rests(self):
        """Nothing rests any more, and nothing is lost: what was computed can be found."""
        self.cache.end_rests()

    @rule()
    def launch(self):
        """A step computes the next token of all leases that have room; it reads all before it."""
        if len(self.flights) == 2:
            return
        flight = []
        for one in self.alive:
            if one.num_computed < one.lease.capacity_tokens:
                blocks = one.lease.block_table[: one.num_computed // self.block_size + 1].copy()
                before = self.buffer.data[blocks].reshape(-1)[: one.num_computed]
                flight.append((one, one.num_computed, blocks, before))
        self.flights.append(flight)
        self.cache.open_fence()

    @rule()
    def land(self):
        """The oldest step ends. Whatever became of its leases, nobody else used their blocks meanwhile."""
        if not self.flights:
            return
        for one, position, blocks, before in self.flights.pop(0):
            np.testing.assert_array_equal(self.buffer.data[blocks].reshape(-1)[:position], before)
            if one not in self.alive and one.num_computed <= position:
                self.buffer.data[blocks[-1], position % self.block_size] = -1
        self.cache.close_fence()

    @rule()
    def flush(self):
        self.cache.flush()

    @invariant()
    def every_computed_token_has_its_kv(self):
        for one in self.alive:
            self.buffer.verify(one.lease, one.num_computed)

    @invariant()
    def who_holds_what_adds_up(self):
        self.cache.check()
        assert self.cache.stats().num_policy_failures <= self.max_policy_failures

    @rule(num_blocks=st.integers(1, 10))
    def what_counts_as_available_can_be_had(self, num_blocks):
        """A lease of any size up to `num_available` is given, and then nothing is left of that much."""
        if num_blocks > self.cache.num_available:
            return
        alone = Namespace(salt=f"alone{self.now}")
        lease = self.cache.reserve(alone, np.zeros(num_blocks * self.block_size, dtype=np.int32), 0)
        assert lease is not None
        self.cache.free(lease, 0)

    def teardown(self):
        while self.flights:
            self.land()
        for one in self.alive:
            self.cache.free(one.lease, one.num_computed)
        self.cache.end_rests()
        self.cache.flush()
        self.cache.check()
        assert self.cache.stats().num_free_blocks == self.num_blocks


class HashCacheMachine(CacheMachine):
    def make_index(self, key_space: KeySpace):
        return HashIndex(key_space)


class FailingPolicyMachine(CacheMachine):
    """The policy raises at its n-th call, before or after it did its work; nothing else may notice."""

    max_policy_failures = 1

    def __init__(self) -> None:
        self.policy = FailingPolicy(LRUPolicy())
        super().__init__()

    def make_index(self, key_space: KeySpace):
        return RadixIndex(key_space.block_size, self.policy)

    @initialize(num_calls=st.integers(0, 60), acts_first=st.booleans())
    def fail_at(self, num_calls, acts_first):
        self.policy.arm(num_calls, acts_first=acts_first)


class HashFailingPolicyMachine(FailingPolicyMachine):
    def make_index(self, key_space: KeySpace):
        return HashIndex(key_space, self.policy)


class DisabledCacheMachine(CacheMachine):
    def make_index(self, key_space: KeySpace):
        return None


_SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)
for _machine in (
    CacheMachine,
    HashCacheMachine,
    FailingPolicyMachine,
    HashFailingPolicyMachine,
    DisabledCacheMachine,
):
    _machine.TestCase.settings = _SETTINGS

TestRadixCache = CacheMachine.TestCase
TestHashCache = HashCacheMachine.TestCase
TestPolicyThatRaises = FailingPolicyMachine.TestCase
TestPolicyThatRaisesInHashIndex = HashFailingPolicyMachine.TestCase
TestDisabledCache = DisabledCacheMachine.TestCase
