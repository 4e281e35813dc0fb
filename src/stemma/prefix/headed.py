"""HeadedIndex: lets the prompts of all namespaces share published heads, over any index.

A prompt of a namespace with a `PublicHead` is two chains of the index below: the head in the public
namespace, the rest in a namespace of its own, which binds the head. Nothing else is shared: what follows a
head is found by its own namespace alone.

The chains are evicted independently. If a head leaves before what follows it, the rest isn't found until the
head is back; its blocks are evictable as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from stemma.errors import IntegrityError
from stemma.prefix.eviction.policy import DEFAULT_TRAITS, BlockTraits, Conclusion
from stemma.prefix.index import NO_TOKENS, Inserted, Match, PrefixIndex
from stemma.prefix.keys import Namespace
from stemma.types import BlockIds, TokenArray


class HeadedIndex(PrefixIndex):
    """`inner`, plus public heads. Blocks of a prompt are given and returned as one chain, the head first."""

    def __init__(self, inner: PrefixIndex) -> None:
        self.inner = inner
        self.block_size = inner.block_size
        self._is_public: npt.NDArray[np.bool_] = np.zeros(1024, dtype=np.bool_)
        """By block id: whether it belongs to a head."""

    @override
    def match(self, namespace: Namespace, tokens: TokenArray) -> Match:
        head = namespace.head
        if head is None:
            return self.inner.match(namespace, tokens)
        found = self.inner.match(namespace.public, tokens[: head.num_tokens])
        if found.num_tokens < head.num_tokens or len(tokens) == head.num_tokens:
            return found
        rest = self.inner.match(namespace, tokens[head.num_tokens :])
        block_ids = np.concatenate((found.block_ids, rest.block_ids))
        return Match(head.num_tokens + rest.num_tokens, block_ids, rest.following)

    def insert(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        block_ids: BlockIds,
        now: float,
        traits: BlockTraits = DEFAULT_TRAITS,
    ) -> Inserted:
        """Enter the chain of blocks that holds `tokens`: its head for all, the rest for `namespace`."""
        head = namespace.head
        if head is None:
            inserted = self.inner.insert(namespace, tokens, block_ids, now, traits)
            self._mark(inserted, is_public=namespace.is_public)
            return inserted
        num_blocks = head.num_tokens // self.block_size
        first = self.inner.insert(
            namespace.public,
            tokens[: head.num_tokens],
            block_ids[:num_blocks],
            now,
            replace(
                traits.part(0, min(num_blocks, len(block_ids))), session=0, came_from=0
            ),  # it is of no session
        )
        self._mark(first, is_public=True)
        if len(tokens) <= head.num_tokens:
            return first
        rest = self.inner.insert(
            namespace,
            tokens[head.num_tokens :],
            block_ids[num_blocks:],
            now,
            traits.part(num_blocks, len(block_ids)),
        )
        self._mark(rest, is_public=False)
        return Inserted(
            np.concatenate((first.canonical, rest.canonical)),
            np.concatenate((first.added, rest.added)),
            np.concatenate((first.dropped, rest.dropped)),
        )

    def touch(self, block_ids: BlockIds, now: float) -> None:
        """Tell the policy that a prompt's blocks were used."""
        num_head = self._num_head(block_ids)
        if num_head:
            self.inner.touch(block_ids[:num_head], now)
        if num_head < len(block_ids):
            self.inner.touch(block_ids[num_head:], now)

    def hint(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Tell the policy of other hints; those of a public head are the operator's."""
        num_head = self._num_head(block_ids)
        self.inner.hint(block_ids[num_head:], now, traits.part(num_head, len(block_ids)))

    def conclude(self, block_ids: BlockIds, conclusion: Conclusion) -> None:
        """Tell the policy how the request ended; a head belongs to nobody's conversation."""
        self.inner.conclude(block_ids[self._num_head(block_ids) :], conclusion)

    @override
    def pin(self, block_ids: BlockIds) -> None:
        self.inner.pin(block_ids)

    @override
    def unpin(self, block_ids: BlockIds) -> None:
        self.inner.unpin(block_ids)

    def evict(self, num_blocks: int, now: float) -> BlockIds:
        """Evict up to `num_blocks` unpinned blocks, leaves of their chains first; return them."""
        return self.inner.evict(num_blocks, now)

    @override
    def next_victim(self, now: float) -> int | None:
        return self.inner.next_victim(now)

    def continuation(self, namespace: Namespace, tokens: TokenArray, max_tokens: int) -> TokenArray:
        """Return up to `max_tokens` tokens that followed `tokens` before. Nothing across a head's end."""
        head = namespace.head
        if head is None:
            return self.inner.continuation(namespace, tokens, max_tokens)
        if len(tokens) <= head.num_tokens:
            return NO_TOKENS
        return self.inner.continuation(namespace, tokens[head.num_tokens :], max_tokens)

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Set how many blocks each owner may hold. Heads have no owner, so no quota."""
        self.inner.set_quotas(quotas)

    @override
    def charge(self, owner: str, num_blocks: int) -> None:
        self.inner.charge(owner, num_blocks)

    @property
    @override
    def owners_over_quota(self) -> list[str]:
        return self.inner.owners_over_quota

    @override
    def next_of(self, owner: str) -> int | None:
        return self.inner.next_of(owner)

    @property
    @override
    def num_over_quota(self) -> int:
        return self.inner.num_over_quota

    @property
    def num_policy_failures(self) -> int:  # type: ignore[override]
        """How often the policy raised and LRU took over: 0, or 1."""
        return self.inner.num_policy_failures

    def walk(self) -> Iterator[tuple[Namespace, TokenArray, BlockIds]]:
        """Yield every chain: heads, and what follows them under its own namespace."""
        return self.inner.walk()

    @override
    def check(self) -> None:
        self.inner.check()
        for namespace, _, block_ids in self.inner.walk():
            if (self._is_public[block_ids] != namespace.is_public).any():
                raise IntegrityError("a block counts as public and isn't, or the other way round")

    @property
    @override
    def num_blocks(self) -> int:
        return self.inner.num_blocks

    @property
    @override
    def num_evictable(self) -> int:
        return self.inner.num_evictable

    def _mark(self, inserted: Inserted, *, is_public: bool) -> None:
        """Note to which kind of chain these blocks belong. An evicted block is marked when it comes back."""
        if len(inserted.canonical):
            highest = int(inserted.canonical.max())
            if highest >= len(self._is_public):
                grown = np.zeros(max(highest + 1, 2 * len(self._is_public)), dtype=np.bool_)
                grown[: len(self._is_public)] = self._is_public
                self._is_public = grown
            self._is_public[inserted.canonical] = is_public

    def _num_head(self, block_ids: BlockIds) -> int:
        """Return how many leading blocks of a chain belong to a head."""
        if not len(block_ids) or int(block_ids.max()) >= len(self._is_public):
            return 0
        public = self._is_public[block_ids]
        return len(public) if public.all() else int(np.argmin(public))
