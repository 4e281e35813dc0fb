"""Pages by SGLang's names on our slow tiers. SGLang's own threads call, and bound how long they wait."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence

from stemma.config.settings import PoolSettings
from stemma.errors import StemmaError
from stemma.memory.tiers.block_store import BlockPut, BlockStore, PutResult, ReadResult
from stemma.memory.tiers.opening import open_disk
from stemma.memory.tiers.pool.opening import open_pool
from stemma.memory.tiers.pool.reads import BATCH_BLOCKS
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace
from stemma.types import BlockKey
from stemma_connect.settings import StorageSettings

_SWEEP_EVERY_S = 60.0


class PageStores:
    """Disk and pool, nearest first. Any thread."""

    def __init__(
        self,
        settings: StorageSettings,
        space: KeySpace,
        page_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the tiers. Raises ConfigError (one is too small for a page) or StorageError."""
        self._root = space.root(DEFAULT_NAMESPACE)
        self._stores: list[BlockStore] = []
        self._clock = clock
        self._swept_at = clock()
        if settings.disk_cache is not None:
            self._stores.append(
                open_disk(
                    settings.disk_cache,
                    settings.disk_cache_size,
                    space,
                    page_bytes,
                    eviction=settings.eviction,
                    ttl_s=settings.disk_cache_ttl_s,
                )
            )
        if settings.pool is not None:
            try:
                self._stores.append(_pool(settings.pool, space, page_bytes))
            except StemmaError:
                self.close()
                raise

    def key(self, name: str) -> BlockKey:
        """Return our key of a page: SGLang's name binds tokens and salt, ours model and layout as well."""
        return BlockKey(hashlib.sha256(self._root + name.encode()).digest())

    def num_leading(self, names: Sequence[str]) -> int:
        """Return how many leading pages some tier probably has."""
        keys, count = [self.key(name) for name in names], 0
        for store in self._stores:
            present = store.exists_many(keys[count:])
            count += next((n for n, is_there in enumerate(present) if not is_there), len(present))
        return count

    def held(self, names: Sequence[str]) -> list[bool]:
        """Return which pages some tier probably has, also behind a gap."""
        keys = [self.key(name) for name in names]
        present = [False] * len(keys)
        for store in self._stores:
            for start in range(
                0, len(keys), BATCH_BLOCKS
            ):  # a pool answers no further than a batch with a gap
                some = store.exists_many(keys[start : start + BATCH_BLOCKS])
                for number, is_there in enumerate(some, start):
                    present[number] |= is_there
        return present

    def read(self, names: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        """Read pages, each from the nearest tier that delivers sound bytes; return which were read.

        The buffer of a page that wasn't read is undefined.
        """
        keys = [self.key(name) for name in names]
        done = [False] * len(keys)
        for store in self._stores:
            left = [n for n, is_done in enumerate(done) if not is_done]
            if not left:
                break
            results = store.get_many([keys[n] for n in left], [into[n] for n in left])
            for n, result in zip(left, results, strict=True):
                done[n] = result is ReadResult.HIT
        return done

    def write(self, names: Sequence[str], before: str | None, pages: Sequence[memoryview]) -> list[bool]:
        """Write pages that follow each other to every tier; return which one tier at least now holds.

        `before`: name of the page before the first; None: they begin a prompt, or nobody knows.
        """
        keys = [self.key(name) for name in names]
        parents = [self._root if before is None else self.key(before), *keys]
        puts = [
            BlockPut(key, parents[n], page) for n, (key, page) in enumerate(zip(keys, pages, strict=True))
        ]
        held = [False] * len(keys)
        for store in self._stores:
            for n, result in enumerate(store.put_many(puts)):
                held[n] |= result in (PutResult.STORED, PutResult.EXISTS)
        self._sweep()
        return held

    def clear(self) -> None:
        """Drop what this process's tiers hold; a shared pool is kept."""
        for store in self._stores:
            store.clear()

    def counts(self) -> Counter[str]:
        """Return what happened so far: ``tier/hit``, ``tier/stored``, ``tier/checksum`` and so on."""
        total: Counter[str] = Counter()
        for store in self._stores:
            one = store.counters.snapshot()
            for counter in (one.reads, one.puts, one.reasons):
                total.update({f"{store.tier}/{name}": count for name, count in counter.items()})
        return total

    def close(self) -> None:
        """Close the tiers."""
        for store in self._stores:
            store.close()

    def _sweep(self) -> None:
        now = self._clock()
        if now - self._swept_at > _SWEEP_EVERY_S:
            self._swept_at = now
            for store in self._stores:
                store.expire()
                store.sync()


def _pool(settings: PoolSettings, space: KeySpace, page_bytes: int) -> BlockStore:
    return open_pool(settings, space, page_bytes, pin_memory=False)
