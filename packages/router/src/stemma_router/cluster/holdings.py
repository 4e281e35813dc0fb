"""Which replica holds which blocks, as their KV events say, in 20 bytes a block and holder.

A block is named by a 64-bit number that stands for its whole prefix (`kv_events.names.chain_of` for tokens,
the ids of a trace in the lab). Replicas name blocks by hashes of their own, of which 32 bits are kept. Events
come late and may be lost, so this is an approximation: it decides where a request goes, never what is reused
there.

All blocks lie in one table (`BlockTable`). Its key is a block's name mixed with a number of the replica that
changes whenever the replica's blocks are cleared: so clearing takes no time, and what was known before is
overwritten later. When the table is as full as it may be, the blocks that no prompt has matched for longest
make room for new ones.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from stemma_router.cluster.block_columns import Words, mixed, words_of
from stemma_router.cluster.block_table import BlockTable
from stemma_router.kv_events.names import CHECKPOINT

DEVICE = "GPU"
"""The nearest tier, as vLLM's events call it."""
MAX_BLOCKS = 64_000_000
"""Blocks of all replicas together, each counted once for each holder: 1.6 GB."""
_TIERS = {DEVICE: 1, "CPU": 2, "STORAGE": 4}
_OTHER_TIERS = 8
_MAX_OWNERS = 65_536
_WORTH_SWEEPING = 0.1
"""Share of a full table that cleared replicas left."""
_ODD = 0x9E3779B97F4A7C15
_FIRST_STEP = 8
"""Blocks of a chain that are looked up at once, at first."""


class Holdings:
    """Blocks by replica and tier. A replica is a small number.

    One thread may change it while others read: they see a block that is being replaced, and nothing worse.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, secret: int | None = None) -> None:
        """`secret` decides which blocks share a place; by default nobody outside knows."""
        self._table = BlockTable(max_blocks)
        self._secret = secrets.randbits(64) if secret is None else secret
        self._owners: list[int] = []
        """By replica: its number in the table, anew after each `clear`."""
        self._salts = np.zeros(0, dtype=np.uint64)
        """By replica: what its blocks' names are mixed with."""
        self._resuming: frozenset[int] = frozenset()
        """Replicas that go on from checkpoints alone."""
        self._live: set[int] = set()
        self._next_owner = 0
        self._lock = threading.Lock()
        """Of the owners' numbers: readers need them too."""

    @property
    def num_ids(self) -> int:
        """Blocks that are known, each counted once for each holder."""
        return sum(self._table.counts.get(owner, 0) for owner in self._owners)

    @property
    def num_evicted(self) -> int:
        """Blocks that were dropped, coldest first, because there are too many."""
        return self._table.num_evicted

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return self._table.num_bytes

    def num_blocks(self, replica: int) -> int:
        """Return how many blocks a replica is known to hold."""
        return self._table.counts.get(self._owner(replica), 0)

    def store(
        self, replica: int, ids: Iterable[int] | Words, tier: str = DEVICE, told: Words | None = None
    ) -> None:
        """Note blocks that a replica now holds; `told` are its own hashes of them, by default their names."""
        names = words_of(ids)
        if len(names):
            owner = self._owner(replica)
            self._make_room(len(names))
            prints = self._prints(replica, names if told is None else told)
            self._table.put(names ^ self._salts[replica], prints, owner, _bit_of(tier))

    def copy(self, replica: int, told: Words, tier: str) -> int:
        """Note blocks, by the replica's own hashes, in a further tier; return how many aren't known."""
        owner = self._owner(replica)
        return self._table.add_tier(self._prints(replica, told), owner, _bit_of(tier))

    def remove(self, replica: int, told: Iterable[int] | Words, tier: str = DEVICE) -> None:
        """Note blocks, by the replica's own hashes, that left a tier there; unknown ones are ignored."""
        owner = self._owner(replica)
        self._table.remove_tier(self._prints(replica, words_of(told)), owner, _bit_of(tier))

    def names(self, replica: int, told: Words) -> Words:
        """Return the names of blocks by the replica's own hashes; 0 for those that aren't known."""
        owner = self._owner(replica)
        keys = self._table.keys_of(self._prints(replica, told), owner)
        return np.where(keys == 0, np.uint64(0), keys ^ self._salts[replica])

    def require_checkpoints(self, replica: int) -> None:
        """Note that a replica's prompts go on from its checkpoints alone.

        A checkpoint is stored as a block is, by the name `kv_events.names.CHECKPOINT` makes of that of the
        block before it.
        """
        if replica not in self._resuming:
            self._resuming |= {replica}

    def clear(self, replica: int, keep: str | None = None) -> None:
        """Note that a replica holds nothing, except in the tier `keep`."""
        owner = self._owner(replica)
        if keep is not None:
            self._table.keep_tier(owner, _bit_of(keep))
            return
        self._resuming -= {replica}
        with self._lock:
            self._live.discard(owner)
            self._owners[replica] = self._new_owner()
            self._salts = self._salts_of(self._owners)

    def depths(self, chain: Sequence[int], num_replicas: int) -> list[int]:
        """Return how many leading blocks of `chain` each replica can go on behind; they count as used.

        It holds all of them, in any tier; one that needs a checkpoint has one behind the last of them.
        """
        depths = np.zeros(num_replicas, dtype=np.int64)
        names = words_of(chain)
        if num_replicas:
            self._owner(num_replicas - 1)
        salts = self._salts
        alive, done, step = np.arange(num_replicas), 0, 1
        while len(alive) and done < len(names):
            keys = names[done : done + step, None] ^ salts[alive][None, :]
            held = self._table.holds(keys.ravel()).reshape(keys.shape)
            whole = held.all(axis=0)
            depths[alive] = done + np.where(whole, len(held), held.argmin(axis=0))
            alive = alive[whole]
            done, step = done + len(held), max(_FIRST_STEP, 2 * step)
        found: list[int] = depths.tolist()
        for replica in self._resuming:
            if replica < num_replicas:
                found[replica] = self._deepest_checkpoint(names[: found[replica]], salts[replica])
        return found

    def _deepest_checkpoint(self, names: Words, salt: np.uint64) -> int:
        """Return the number of blocks of a chain before its deepest checkpoint; 0: it has none."""
        held = np.flatnonzero(self._table.holds((names ^ np.uint64(CHECKPOINT)) ^ salt))
        return int(held[-1]) + 1 if len(held) else 0

    def check(self) -> None:
        """Raise IntegrityError if the table is inconsistent (slow)."""
        self._table.check()

    def _owner(self, replica: int) -> int:
        if replica >= len(self._owners):
            with self._lock:
                while len(self._owners) <= replica:
                    self._owners.append(self._new_owner())
                self._salts = self._salts_of(self._owners)
        return self._owners[replica]

    def _new_owner(self) -> int:
        """Return a number that the table doesn't know."""
        for _ in range(_MAX_OWNERS):
            self._next_owner = (self._next_owner + 1) % _MAX_OWNERS
            if self._next_owner not in self._live and not self._table.counts.get(self._next_owner):
                break
        self._live.add(self._next_owner)
        return self._next_owner

    def _make_room(self, num_more: int) -> None:
        """Drop what cleared replicas had, or let the table grow, if it is nearly full."""
        table = self._table
        if table.is_full(num_more):
            if table.num_blocks - self.num_ids > _WORTH_SWEEPING * table.num_blocks:
                table.sweep(self._live)
            table.grow(num_more)

    def _salts_of(self, owners: Sequence[int]) -> Words:
        words = [(self._secret + owner * _ODD) % (1 << 64) for owner in owners]
        return mixed(np.array(words, dtype=np.uint64))

    def _prints(self, replica: int, told: Words) -> Words:
        return mixed(told ^ self._salts[replica])


def _bit_of(tier: str) -> int:
    return _TIERS.get(tier, _OTHER_TIERS)
