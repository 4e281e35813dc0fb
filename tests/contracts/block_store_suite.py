"""What every block store must do. Inherit `BlockStoreContract` and provide `make_store`.

A store that this process alone uses inherits `LocalStoreContract`, which adds budgets, pins and order.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from stemma.errors import StorageError
from stemma.memory.tiers.block_store import BlockPut, BlockStore, PutResult, ReadResult
from stemma.memory.tiers.slotted import SlottedStore
from stemma.types import BlockKey

BLOCK_BYTES = 4096
ROOT = BlockKey(hashlib.sha256(b"root").digest())


def key_of(name: object) -> BlockKey:
    return BlockKey(hashlib.sha256(str(name).encode()).digest())


def bytes_of(key: BlockKey, block_bytes: int = BLOCK_BYTES) -> bytearray:
    """Return the content that belongs to `key`: different for each key."""
    return bytearray((key * (block_bytes // len(key) + 1))[:block_bytes])


def chain(name: object, length: int) -> list[BlockPut]:
    """Return blocks that hang below each other, the first below ROOT."""
    parent, blocks = ROOT, []
    for depth in range(length):
        key = key_of(f"{name}/{depth}")
        blocks.append(BlockPut(key, parent, memoryview(bytes_of(key))))
        parent = key
    return blocks


def keys(blocks: list[BlockPut]) -> list[BlockKey]:
    return [block.key for block in blocks]


def read(store: BlockStore, wanted: list[BlockKey]) -> list[ReadResult]:
    """Read and prove that every hit carries exactly its own bytes."""
    buffers = [bytearray(BLOCK_BYTES) for _ in wanted]
    results = store.get_many(wanted, [memoryview(buffer) for buffer in buffers])
    for key, buffer, result in zip(wanted, buffers, results, strict=True):
        if result is ReadResult.HIT:
            assert buffer == bytes_of(key)
    return results


class BlockStoreContract(ABC):
    @abstractmethod
    def make_store(self, tmp_path: Path, capacity_blocks: int) -> BlockStore:
        """Return an empty store for blocks of BLOCK_BYTES bytes."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[BlockStore]:
        store = self.make_store(tmp_path, 64)
        yield store
        store.close()

    def test_what_was_put_is_read(self, store: BlockStore) -> None:
        blocks = chain("a", 5)
        assert store.put_many(blocks) == [PutResult.STORED] * 5
        assert store.exists_many(keys(blocks)) == [True] * 5
        assert read(store, keys(blocks)) == [ReadResult.HIT] * 5
        assert store.counters.reads[ReadResult.HIT] == 5
        assert store.counters.puts[PutResult.STORED] == 5
        assert store.counters.read_bytes == store.counters.written_bytes == 5 * BLOCK_BYTES

    def test_results_are_per_key(self, store: BlockStore) -> None:
        blocks = chain("a", 3)
        store.put_many(blocks)
        wanted = [blocks[2].key, key_of("absent"), blocks[0].key]
        assert store.exists_many(wanted) == [True, False, True]
        assert read(store, wanted) == [ReadResult.HIT, ReadResult.MISS, ReadResult.HIT]
        assert store.counters.reads[ReadResult.MISS] == 1

    def test_a_read_in_two_parts(self, store: BlockStore) -> None:
        """The second part may run in another thread, and after the next read has begun."""
        blocks = chain("a", 4)
        store.put_many(blocks)
        wanted = [*keys(blocks[:3]), key_of("absent"), blocks[3].key]
        buffers = [bytearray(BLOCK_BYTES) for _ in wanted]
        views = [memoryview(buffer) for buffer in buffers]
        first = store.fetch_many(wanted[:2], views[:2])
        second = store.fetch_many(wanted[2:], views[2:])
        got: list[ReadResult] = []
        thread = threading.Thread(target=lambda: got.extend([*first(), *second()]))
        thread.start()
        thread.join()
        hit = ReadResult.HIT
        assert got == [hit, hit, hit, ReadResult.MISS, hit]
        assert [bytes(b) for b, result in zip(buffers, got, strict=True) if result is hit] == [
            bytes_of(block.key) for block in blocks
        ]
        assert store.counters.reads == {hit: 4, ReadResult.MISS: 1}

    def test_a_loan_is_a_read(self, store: BlockStore) -> None:
        """Whoever lends, lends bytes that are proven; at least one key is answered at a time."""
        blocks = chain("a", 5)
        store.put_many(blocks)
        wanted = [*keys(blocks), key_of("absent")]
        results: list[ReadResult] = []
        while len(results) < len(wanted) and (loan := store.lend_many(wanted[len(results) :])) is not None:
            assert loan.results
            for place, result, key in zip(loan.places, loan.results, wanted[len(results) :], strict=False):
                assert result is not ReadResult.HIT or bytes(place) == bytes_of(key)
            results += loan.results
            loan.free()
        assert results in ([], [ReadResult.HIT] * 5 + [ReadResult.MISS])
        assert store.counters.reads.total() == len(results)

    def test_empty_batches(self, store: BlockStore) -> None:
        assert store.exists_many([]) == []
        assert store.get_many([], []) == []
        assert store.put_many([]) == []
        assert store.remove([]) == 0

    def test_an_existing_key_keeps_its_bytes(self, store: BlockStore) -> None:
        block = chain("a", 1)[0]
        store.put_many([block])
        other = BlockPut(block.key, ROOT, memoryview(bytearray(BLOCK_BYTES)))
        assert store.put_many([other]) == [PutResult.EXISTS]
        assert read(store, [block.key]) == [ReadResult.HIT]

    def test_the_callers_buffer_is_free_after_put(self, store: BlockStore) -> None:
        key = key_of("a")
        data = bytes_of(key)
        store.put_many([BlockPut(key, ROOT, memoryview(data))])
        data[:] = bytes(BLOCK_BYTES)
        assert read(store, [key]) == [ReadResult.HIT]

    def test_removed_keys_are_misses(self, store: BlockStore) -> None:
        blocks = chain("a", 3)
        store.put_many(blocks)
        assert store.remove([blocks[2].key, key_of("absent")]) == 1
        assert store.exists_many(keys(blocks)) == [True, True, False]
        assert read(store, keys(blocks)) == [ReadResult.HIT, ReadResult.HIT, ReadResult.MISS]

    def test_a_block_may_come_before_its_parent(self, store: BlockStore) -> None:
        blocks = chain("a", 3)
        for block in reversed(blocks):
            assert store.put_many([block]) == [PutResult.STORED]
        assert read(store, keys(blocks)) == [ReadResult.HIT] * 3

    def test_a_buffer_of_the_wrong_size_is_misuse(self, store: BlockStore) -> None:
        key = key_of("a")
        with pytest.raises(ValueError, match="buffer"):
            store.get_many([key], [memoryview(bytearray(BLOCK_BYTES - 1))])
        with pytest.raises(ValueError, match="buffer"):
            store.get_many([key], [])
        with pytest.raises(ValueError, match="buffer"):
            store.put_many([BlockPut(key, ROOT, memoryview(bytearray(BLOCK_BYTES + 1)))])

    def test_close_twice_then_use(self, store: BlockStore) -> None:
        store.close()
        store.close()
        with pytest.raises(StorageError):
            store.get_many([key_of("a")], [memoryview(bytearray(BLOCK_BYTES))])

    def test_many_threads_never_see_foreign_bytes(self, store: BlockStore) -> None:
        blocks = [block for name in range(8) for block in chain(name, 4)]
        wrong: list[BaseException] = []

        def work(offset: int) -> None:
            try:
                for turn in range(12):
                    at = (offset * 7 + turn * 5) % len(blocks)
                    part = blocks[at : at + 4]
                    store.put_many(part)
                    read(store, keys(part))
                    if turn % 3 == 0:
                        store.remove([part[-1].key])
            except (AssertionError, StorageError, ValueError) as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


class LocalStoreContract(BlockStoreContract):
    @abstractmethod
    def make_store(self, tmp_path: Path, capacity_blocks: int) -> SlottedStore:
        """Return an empty store with an LRU policy for exactly `capacity_blocks` blocks."""

    @pytest.fixture
    def small(self, tmp_path: Path) -> Iterator[SlottedStore]:
        store = self.make_store(tmp_path, 4)
        yield store
        store.check()
        store.close()

    def test_never_over_capacity(self, small: SlottedStore) -> None:
        for name in range(6):
            small.put_many(chain(name, 3))
            assert small.num_blocks <= small.capacity_blocks == 4
            small.check()
        assert small.counters.num_evicted == 6 * 3 - 4

    def test_leaves_go_first(self, small: SlottedStore) -> None:
        old, new = chain("old", 3), chain("new", 3)
        small.put_many(old)
        small.put_many(new)
        assert small.exists_many(keys(old)) == [True, False, False]
        assert small.exists_many(keys(new)) == [True, True, True]

    def test_a_read_is_a_use(self, small: SlottedStore) -> None:
        first, second, third = chain("a", 2), chain("b", 2), chain("c", 1)
        small.put_many(first)
        small.put_many(second)
        read(small, keys(first))
        small.put_many(third)
        assert small.exists_many(keys(first)) == [True, True]
        assert small.exists_many(keys(second)) == [True, False]

    def test_what_is_read_but_not_proven_yet_stays(self, small: SlottedStore) -> None:
        block = chain("a", 1)[0]
        small.put_many([block])
        buffer = bytearray(BLOCK_BYTES)
        prove = small.fetch_many([block.key], [memoryview(buffer)])
        assert small.remove([block.key]) == small.clear() == 0
        assert prove() == [ReadResult.HIT]
        assert buffer == bytes_of(block.key)
        assert small.remove([block.key]) == 1

    def test_pinned_blocks_stay(self, small: SlottedStore) -> None:
        pinned = chain("a", 2)
        small.put_many(pinned)
        assert small.pin([*keys(pinned), key_of("absent")]) == [True, True, False]
        for name in range(3):
            small.put_many(chain(name, 2))
        assert read(small, keys(pinned)) == [ReadResult.HIT] * 2
        assert small.remove(keys(pinned)) == 0
        assert small.clear() == 2
        assert small.num_blocks == 2
        small.unpin(keys(pinned))
        with pytest.raises(ValueError, match="pin"):
            small.unpin(keys(pinned))
        assert small.clear() == 2
        assert small.num_blocks == 0

    def test_no_space_when_everything_is_pinned(self, small: SlottedStore) -> None:
        blocks = chain("a", 4)
        small.put_many(blocks)
        small.pin(keys(blocks))
        assert small.put_many(chain("b", 1)) == [PutResult.NO_SPACE]
        small.unpin(keys(blocks))

    def test_a_chain_longer_than_the_store_keeps_its_head(self, small: SlottedStore) -> None:
        blocks = chain("a", 6)
        results = small.put_many(blocks)
        assert results == [PutResult.STORED] * 4 + [PutResult.NO_SPACE] * 2
        assert small.exists_many(keys(blocks)) == [True] * 4 + [False] * 2

    def test_cleared_space_is_usable(self, small: SlottedStore) -> None:
        small.put_many(chain("a", 4))
        assert small.clear() == 4
        assert small.put_many(chain("b", 4)) == [PutResult.STORED] * 4
        assert read(small, keys(chain("a", 4))) == [ReadResult.MISS] * 4
