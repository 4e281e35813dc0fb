"""Translates the KV events of one server, Stemma's or vLLM's, into what a router knows of it.

Events of a server name blocks by its own hashes. With the tokens that come along, each gets the name that the
router computes from a prompt (`names.py`). Events of one kind that follow each other are applied together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stemma.told import adapter_root
from stemma.types import TokenArray
from stemma_router.kv_events.names import CHECKPOINT, chain_of, told_words
from stemma_router.kv_events.schema import (
    CHECKPOINT_KIND,
    CPU,
    GPU,
    KV_KINDS,
    MAX_BLOCK_SIZE,
    STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    Event,
    Hash,
)

Words = npt.NDArray[np.uint64]
_MOST_ROOTS = 1024
_TIERS = {1: GPU, 2: CPU, 4: STORAGE}
"""By bit in `BlocksHeld.tiers`."""


class HoldingsOf(Protocol):
    """The index behind a follower (`cluster.holdings.Holdings`). `told`: 64 bits of a server's own hashes."""

    def store(self, replica: int, ids: Words, tier: str, told: Words) -> None:
        """Note blocks that a replica now holds, by name."""

    def copy(self, replica: int, told: Words, tier: str) -> int:
        """Note that blocks are in a further tier; return how many aren't known."""

    def remove(self, replica: int, told: Words, tier: str) -> None:
        """Note blocks that left a tier of a replica."""

    def names(self, replica: int, told: Words) -> Words:
        """Return the names of blocks; 0 for those that aren't known."""

    def require_checkpoints(self, replica: int) -> None:
        """Note that a replica goes on from its checkpoints alone."""

    def clear(self, replica: int, keep: str | None = None) -> None:
        """Note that nothing is known of a replica, except of its tier `keep`."""


class EventFollower:
    """Translates the events of one replica. Not thread-safe."""

    def __init__(self, replica: int, holdings: HoldingsOf) -> None:
        self._replica = replica
        self._holdings = holdings
        self.block_size: int | None = None
        """Of the server; None before its first event."""
        self.num_events = 0
        self.num_unplaced = 0
        """Blocks of events whose tokens or predecessors aren't known."""
        self.roots: set[int] = set()
        """Of adapters whose blocks it told of; a few, the first."""
        self._has_kv: dict[int, bool] = {}
        """Groups of layers that the server told the kind of: whether their blocks hold KV of every token."""

    def take(self, events: Sequence[Event]) -> None:
        """Apply a batch, in order."""
        batch = _Batch(self._replica, self._holdings)
        for event in events:
            self.num_events += 1
            if isinstance(event, BlockStored | BlocksHeld) and event.has_checkpoints:
                self._holdings.require_checkpoints(self._replica)
            if self._is_left_out(event):
                continue
            if isinstance(event, BlockStored) and event.kv_cache_spec_kind == CHECKPOINT_KIND:
                self._store_checkpoints(event, batch)
            elif isinstance(event, BlockStored) and event.token_ids:
                self._store(event, batch)
            elif isinstance(event, BlockStored):
                batch.copied(event.medium or GPU).extend(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                batch.removed(event.medium or GPU).extend(event.block_hashes)
            elif isinstance(event, BlocksHeld):
                batch.flush()
                self._hold(event)
            elif isinstance(event, AllBlocksCleared):
                batch.flush()
                self.clear()
        batch.flush()
        self.num_unplaced += batch.num_unknown

    def _is_left_out(self, event: Event) -> bool:
        """Whether an event is of layers of vLLM's that keep a window or a state: KV decides where prompts go.

        Their blocks have the names of those with KV, and come and go by themselves.
        """
        if not isinstance(event, BlockStored | BlockRemoved) or event.group_idx is None:
            return False
        if isinstance(event, BlockStored) and event.kv_cache_spec_kind is not None:
            self._has_kv[event.group_idx] = event.kv_cache_spec_kind in (*KV_KINDS, CHECKPOINT_KIND)
        return any(self._has_kv.values()) and not self._has_kv.get(event.group_idx, True)

    def clear(self) -> None:
        """Drop all that is known of the server."""
        self._holdings.clear(self._replica)

    def restart(self) -> None:
        """Another process has taken over the server's disk tier: only what lay there is still known."""
        self._holdings.clear(self._replica, keep=STORAGE)

    def _hold(self, event: BlocksHeld) -> None:
        """Store blocks that the server named itself."""
        self.block_size = event.block_size
        told, names = (
            np.frombuffer(data, dtype="<u8").astype(np.uint64) for data in (event.hashes, event.names)
        )
        tiers = np.frombuffer(event.tiers, dtype=np.uint8)
        for bit, tier in _TIERS.items():
            is_there = (tiers & bit) != 0
            if is_there.any():
                self._holdings.store(self._replica, names[is_there], tier, told[is_there])

    def _store_checkpoints(self, event: BlockStored, batch: _Batch) -> None:
        behind = None if event.parent_block_hash is None else batch.parent_of(event)
        if behind is None:
            self.num_unplaced += len(event.block_hashes)
        else:
            names = [behind ^ CHECKPOINT] * len(event.block_hashes)
            batch.store(event.medium or GPU, event.block_hashes, names)

    def _store(self, event: BlockStored, batch: _Batch) -> None:
        tokens = _tokens_of(event)
        parent = batch.parent_of(event)
        if tokens is None or parent is None:
            self.num_unplaced += len(event.block_hashes)
            return
        self.block_size = event.block_size
        if event.lora_name and len(self.roots) < _MOST_ROOTS:
            self.roots.add(adapter_root(event.lora_name))
        batch.store(event.medium or GPU, event.block_hashes, chain_of(tokens, event.block_size, parent))


class _Batch:
    """Events of one kind and tier that follow each other."""

    def __init__(self, replica: int, holdings: HoldingsOf) -> None:
        self._replica = replica
        self._holdings = holdings
        self._kind: tuple[str, str] | None = None
        self._apply: Callable[[], None] = lambda: None
        self._hashes: list[Hash] = []
        self._names: list[int] = []
        self._recent: dict[Hash, int] = {}
        """Names of blocks of this batch."""
        self.num_unknown = 0

    def parent_of(self, event: BlockStored) -> int | None:
        """Return the name of the block before an event's first; None if it isn't known."""
        parent = event.parent_block_hash
        if parent is None:
            return adapter_root(event.lora_name)
        if parent in self._recent:
            return self._recent[parent]
        return int(self._holdings.names(self._replica, told_words([parent]))[0]) or None

    def store(self, tier: str, hashes: Sequence[Hash], names: Sequence[int]) -> None:
        """Add blocks that were stored."""

        def apply(told: Words) -> None:
            self._holdings.store(self._replica, np.array(self._names, dtype=np.uint64), tier, told)

        self._begin("stored", tier, apply).extend(hashes)
        self._names.extend(names)
        self._recent.update(zip(hashes, names, strict=True))

    def copied(self, tier: str) -> list[Hash]:
        """Return where blocks go that were copied to a tier."""

        def apply(told: Words) -> None:
            self.num_unknown += self._holdings.copy(self._replica, told, tier)

        return self._begin("copied", tier, apply)

    def removed(self, tier: str) -> list[Hash]:
        """Return where blocks go that left a tier."""
        return self._begin("removed", tier, lambda told: self._holdings.remove(self._replica, told, tier))

    def flush(self) -> None:
        """Apply what was added."""
        self._apply()
        self._kind, self._apply, self._hashes, self._names = None, lambda: None, [], []

    def _begin(self, kind: str, tier: str, apply: Callable[[Words], None]) -> list[Hash]:
        if self._kind != (kind, tier):
            self.flush()
            self._kind = (kind, tier)
            self._apply = lambda: apply(told_words(self._hashes))
        return self._hashes


def _tokens_of(event: BlockStored) -> TokenArray | None:
    """Return the tokens of an event's blocks, [n] int32; None if they don't fit, or can't be ids."""
    count, size = len(event.block_hashes), event.block_size
    if not 0 < size <= MAX_BLOCK_SIZE or len(event.token_ids) != count * size:
        return None
    try:
        tokens = np.array(event.token_ids, dtype=np.int64)
    except OverflowError:
        return None
    return tokens.astype(np.int32) if tokens.min() >= 0 and tokens.max() < 2**31 else None
