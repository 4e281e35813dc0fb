"""The contract of a prefix index: which leading blocks of a token sequence have KV, and under which id.

An index holds *blocks* of `block_size` tokens. A block id is chosen by the caller (a slot in a tier); the
index knows only that a chain of ids holds the KV of a chain of tokens. The last block of a chain may be
*partial* (fewer tokens than `block_size`); a fuller block that starts with the same tokens supersedes it.

Rules that every implementation keeps, and that `check()` proves:

* Prefix-closed: a block is present only if all blocks before it are.
* Leaves first: `evict` takes a block only after all its descendants.
* A pinned block is never evicted. Pins are taken on chains from the root, so no pinned block is below an
  unpinned one. Only full blocks can be pinned: a request that reuses part of a block copies it.
* `match` changes nothing: no split, no recency, no counters.
* A policy that raises, in any call, breaks none of these rules: the call succeeds, and LRU takes over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from stemma.prefix.eviction.policy import DEFAULT_TRAITS, BlockTraits, Conclusion
from stemma.prefix.keys import Namespace
from stemma.types import BlockIds, TokenArray

MAX_FOLLOWING = 16
"""Tokens of `Match.following` at most."""
NO_TOKENS: TokenArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a token sequence."""

    num_tokens: int
    """Leading tokens whose KV is present, at token granularity."""
    block_ids: BlockIds
    """The ``ceil(num_tokens / block_size)`` blocks that hold them. If `num_tokens` isn't a multiple of
    the block size, only the head of the last block belongs to the sequence: copy it, don't share it."""
    following: TokenArray = field(default_factory=lambda: NO_TOKENS)
    """Where the prompt goes on and so do cached sequences that begin with the match: how one of them goes on,
    at most `MAX_FOLLOWING` tokens. Empty if none does, and where nothing matched. For explanations."""

    def num_full_blocks(self, block_size: int) -> int:
        """Return how many of the blocks can be shared as they are."""
        return self.num_tokens // block_size


@dataclass(frozen=True, slots=True)
class Inserted:
    """The fate of each block offered to `insert`."""

    canonical: BlockIds
    """Same length as the blocks offered: the id under which the index now holds each of them. If it
    differs from the id offered, that block was a duplicate and still belongs to the caller."""
    added: BlockIds
    """Offered ids that entered the index by this call; the index owns a reference to each."""
    dropped: BlockIds
    """Partial blocks that left the index because a fuller one superseded them."""


class PrefixIndex(ABC):
    """Which token prefixes are cached. Not thread-safe: one owner, the step loop."""

    block_size: int
    num_policy_failures: int
    """How often the policy raised and LRU took over: 0, or 1."""

    @abstractmethod
    def match(self, namespace: Namespace, tokens: TokenArray) -> Match:
        """Return the longest cached prefix of `tokens`. Read-only; O(matched length)."""

    @abstractmethod
    def insert(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        block_ids: BlockIds,
        now: float,
        traits: BlockTraits = DEFAULT_TRAITS,
    ) -> Inserted:
        """Enter the chain of blocks that holds `tokens`, starting at the root of `namespace`.

        `block_ids` has ``ceil(len(tokens) / block_size)`` entries. Blocks already present are kept (the
        offered id is a duplicate if it differs); inserting isn't a use of them, so `touch` them too if it
        was one. A partial block offered again under its own id, now with more tokens, has simply grown.
        `now` is the injected clock, seconds.
        Raises ValueError, and changes nothing, if the lengths don't fit or an added id is negative or
        already in the index elsewhere.
        """

    @abstractmethod
    def touch(self, block_ids: BlockIds, now: float) -> None:
        """Tell the policy that a chain of blocks (in order from the root) was used.

        Raises ValueError if a block isn't in the index.
        """

    @abstractmethod
    def hint(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Tell the policy of other retention hints for a chain of pinned blocks, in order from the root."""

    @abstractmethod
    def conclude(self, block_ids: BlockIds, conclusion: Conclusion) -> None:
        """Tell the policy how the request ended that used a chain of blocks, in order from the root.

        Raises ValueError if a block isn't in the index.
        """

    @abstractmethod
    def pin(self, block_ids: BlockIds) -> None:
        """Forbid eviction of a chain of full, distinct blocks, in order from the root; pins nest.

        A later call may pin just the next blocks of a chain whose start is pinned. Raises ValueError, and
        pins nothing, if a block is partial or not in the index.
        """

    @abstractmethod
    def unpin(self, block_ids: BlockIds) -> None:
        """Undo one `pin` of each block. Raises ValueError if a block isn't pinned."""

    @abstractmethod
    def evict(self, num_blocks: int, now: float) -> BlockIds:
        """Evict up to `num_blocks` unpinned blocks, leaves first, in the policy's order; return them."""

    @abstractmethod
    def next_victim(self, now: float) -> int | None:
        """Return the block that `evict` would take first, or None."""

    def continuation(self, namespace: Namespace, tokens: TokenArray, max_tokens: int) -> TokenArray:
        """Return up to `max_tokens` tokens that followed `tokens` before; empty if none did. Read-only.

        An index that can't tell returns none.
        """
        return np.empty(0, dtype=np.int32)

    @abstractmethod
    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Set how many blocks each owner (`Namespace.owner`) may hold; others hold any number.

        `evict` takes the blocks of owners that hold more first. This call evicts nothing. O(blocks).
        """

    @abstractmethod
    def charge(self, owner: str, num_blocks: int) -> None:
        """Count to an owner's quota what it holds beside blocks: memory for so many. Evicts nothing."""

    @property
    @abstractmethod
    def owners_over_quota(self) -> list[str]:
        """Owners that hold too much; `evict` takes from the first that has a block to lose."""

    @abstractmethod
    def next_of(self, owner: str) -> int | None:
        """Return the block that an owner over its quota would lose first; None: all are pinned."""

    @property
    @abstractmethod
    def num_over_quota(self) -> int:
        """Blocks that can be evicted now and whose owners hold too many; evicting this number drops those."""

    @abstractmethod
    def walk(self) -> Iterator[tuple[Namespace, TokenArray, BlockIds]]:
        """Yield every cached chain from root to leaf: its namespace, tokens and blocks."""

    @abstractmethod
    def check(self) -> None:
        """Prove the invariants by brute force (slow); raise IntegrityError if one is broken."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of blocks in the index, pinned ones included."""

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Number of blocks that a large enough `evict` would evict now: those that aren't pinned. O(1)."""
