"""Both indexes against a brute-force model: the same operations, compared after every step.

Alphabets and blocks are tiny, so that prompts part in the middle of blocks all the time.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.prefix.prefix_model import PrefixModel, Tokens
from tests.prefix.strict_policy import StrictPolicy

from stemma.prefix.eviction.lru import LRUPolicy
from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.hashed import HashIndex
from stemma.prefix.index import MAX_FOLLOWING, Match, PrefixIndex
from stemma.prefix.keys import KeySpace, Namespace
from stemma.prefix.radix import RadixIndex

NAMESPACES = (Namespace(), Namespace(salt="tenant"))
NUM_IDS = 24
MAX_TOKENS = 14

tails = st.lists(st.integers(0, 2), max_size=6).map(tuple)
namespaces = st.sampled_from(NAMESPACES)


def array(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def fingerprint(text: Tokens) -> int:
    return crc32(bytes(text))


class IndexMachine(RuleBasedStateMachine):
    @initialize(block_size=st.integers(1, 4))
    def start(self, block_size: int) -> None:
        self.block_size = block_size
        self.policies = [StrictPolicy(LRUPolicy()), StrictPolicy(LRUPolicy())]
        self.indexes: list[PrefixIndex] = [
            RadixIndex(block_size, self.policies[0]),
            HashIndex(KeySpace("model", "layout", block_size), self.policies[1]),
        ]
        self.model = PrefixModel(block_size)
        self.history: list[Tokens] = [()]
        self.pinned: list[list[int]] = []
        self.now = 0.0

    def tokens(self, pick: int, keep: int, tail: Tokens) -> Tokens:
        """Return an earlier sequence, truncated and continued."""
        earlier = self.history[pick % len(self.history)]
        return (earlier[: keep % (len(earlier) + 1)] + tail)[:MAX_TOKENS]

    def traits(self, tokens: Tokens) -> BlockTraits:
        heads = [tokens[: i + self.block_size] for i in range(0, len(tokens), self.block_size)]
        return BlockTraits(fingerprints=np.array([fingerprint(head) for head in heads], dtype=np.uint64))

    def chain(self, namespace: Namespace, tokens: Tokens) -> list[int]:
        """Match on both indexes; return the blocks that the radix index found."""
        expected = self.model.match(namespace, tokens)
        found: list[list[int]] = []
        for index in self.indexes:
            match = index.match(namespace, array(tokens))
            assert match.num_tokens == expected
            self.following(namespace, tokens, match)
            ids = match.block_ids.tolist()
            assert len(ids) == -(-expected // self.block_size)
            for i, block_id in enumerate(ids):
                head = tokens[: min((i + 1) * self.block_size, expected)]
                assert block_id in self.model.holders(namespace, head)
            found.append(ids)
        num_full = expected // self.block_size
        assert found[0][:num_full] == found[1][:num_full]
        return found[0]

    def following(self, namespace: Namespace, tokens: Tokens, match: Match) -> None:
        """What follows the match is how some cached sequence goes on, and not how the prompt does."""
        following = tuple(match.following.tolist())
        if not 0 < match.num_tokens < len(tokens):
            assert following == ()
            return
        head = tokens[: match.num_tokens]
        assert following in self.model.continuations(namespace, head, MAX_FOLLOWING)
        assert following[:1] != tokens[match.num_tokens : match.num_tokens + 1]

    @rule(
        namespace=namespaces,
        pick=st.integers(0, 99),
        keep=st.integers(0, MAX_TOKENS),
        tail=tails,
        reuse=st.sampled_from(["shared", "shared and grown", "nothing"]),
    )
    def insert(self, namespace: Namespace, pick: int, keep: int, tail: Tokens, reuse: str) -> None:
        tokens = self.tokens(pick, keep, tail)
        num_blocks = -(-len(tokens) // self.block_size)
        free = [i for i in range(NUM_IDS) if i not in self.model.blocks]
        if len(free) < num_blocks:
            self.evict(num_blocks - len(free))
            free = [i for i in range(NUM_IDS) if i not in self.model.blocks]
        if len(free) < num_blocks:
            return
        present = self.chain(namespace, tokens)
        if reuse == "shared":
            present = present[: self.model.match(namespace, tokens) // self.block_size]
        elif reuse == "nothing":
            present = []
        elif present:
            # Only a partial block that ends where the match ends can grow.
            last = self.model.blocks[present[-1]].text
            if len(last) % self.block_size == 0 or last != tokens[: self.model.match(namespace, tokens)]:
                present.pop()
        ids = present + free[: num_blocks - len(present)]
        self.now += 1.0
        expected = self.model.insert(namespace, tokens, ids)
        for index in self.indexes:
            inserted = index.insert(namespace, array(tokens), array(ids), self.now, self.traits(tokens))
            assert inserted.added.tolist() == expected.added
            assert inserted.dropped.tolist() == expected.dropped
            assert len(inserted.canonical) == num_blocks
            for block_id, allowed in zip(inserted.canonical.tolist(), expected.canonical, strict=True):
                assert block_id in allowed
        self.history.append(tokens)

    @rule(namespace=namespaces, pick=st.integers(0, 99), keep=st.integers(0, MAX_TOKENS), tail=tails)
    def touch(self, namespace: Namespace, pick: int, keep: int, tail: Tokens) -> None:
        chain = self.chain(namespace, self.tokens(pick, keep, tail))
        self.now += 1.0
        self.model.touch(chain)
        for index in self.indexes:
            index.touch(array(chain), self.now)

    @rule(namespace=namespaces, pick=st.integers(0, 99), keep=st.integers(0, MAX_TOKENS))
    def pin(self, namespace: Namespace, pick: int, keep: int) -> None:
        tokens = self.tokens(pick, keep, ())
        chain = self.chain(namespace, tokens)[: self.model.match(namespace, tokens) // self.block_size]
        for index in self.indexes:
            index.pin(array(chain))
        for block_id in chain:
            self.model.blocks[block_id].num_pins += 1
        self.pinned.append(chain)

    @precondition(lambda self: self.pinned)
    @rule(pick=st.integers(0, 99))
    def unpin(self, pick: int) -> None:
        chain = self.pinned.pop(pick % len(self.pinned))
        for index in self.indexes:
            index.unpin(array(chain))
        for block_id in chain:
            self.model.blocks[block_id].num_pins -= 1

    @rule(num_blocks=st.integers(0, 6))
    def evict(self, num_blocks: int) -> None:
        self.now += 1.0
        expected = self.model.evict(num_blocks)
        for index in self.indexes:
            assert index.evict(num_blocks, self.now).tolist() == expected

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        for index, policy in zip(self.indexes, self.policies, strict=True):
            index.check()
            assert index.num_policy_failures == 0
            assert index.num_blocks == len(self.model.blocks)
            pinned = sum(block.num_pins > 0 for block in self.model.blocks.values())
            assert index.num_evictable == len(self.model.blocks) - pinned
            assert policy.known == set(self.model.blocks)
            assert policy.candidates == self.model.candidates()
            for block_id, block in self.model.blocks.items():
                assert policy.fingerprints[block_id] == fingerprint(block.text)
        for namespace in NAMESPACES:
            for tokens in self.history[-3:]:
                self.chain(namespace, tokens)

    @invariant()
    def walks_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        expected = sorted(
            (block.namespace.salt, list(block.text), block_id)
            for block_id, block in self.model.blocks.items()
            if block_id in self.model.tails()
        )
        for index in self.indexes:
            assert isinstance(index, RadixIndex | HashIndex)
            assert expected == sorted(
                (namespace.salt, tokens.tolist(), int(ids[-1])) for namespace, tokens, ids in index.walk()
            )


TestIndexes = IndexMachine.TestCase
TestIndexes.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
