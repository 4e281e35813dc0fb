"""What blocks came with, hints and the session that left them, in every tier and on the ways between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contracts.block_store_suite import BLOCK_BYTES, ROOT, bytes_of, chain, key_of, keys, read
from tests.memory.cache.served_prompts import NS, buffer_of, compute_all, make_cache, reserved, run, tokens
from tests.memory.manual_clock import ManualClock
from tests.memory.tiers.dict_tiers import DictTiers
from tests.memory.tiers.small_disks import SPACE, size_for
from tests.memory.tiers.transfer_rig import BLOCK, TIMEOUT_S, Rig

from stemma.config.settings import PoolSettings
from stemma.memory.tiers.block_store import BlockPut, BlockStore, ReadResult
from stemma.memory.tiers.device_block import NO_NOTES, BlockNotes
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.disk.record import RECORD_BYTES, Record
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.pool.envelope import HEADER_BYTES, damage, notes_in, seal
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.pool_store import PoolStore
from stemma.memory.tiers.pool.shared_directory import open_backend
from stemma.prefix.eviction.registry import make_policy
from stemma.types import BlockKey, RetentionHint, Tier

notes = st.builds(
    BlockNotes,
    st.builds(RetentionHint, st.integers(0, 100), st.sampled_from((None, 0.0, 1.0, 5000.0))),
    st.sampled_from((0, 1, 2**31, 2**32 - 1)),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abcd"), st.integers(1, 4), notes),
        st.tuples(st.sampled_from(("down", "restart", "read", "pool"))),
        st.tuples(st.just("renew"), st.sampled_from("abcd"), st.integers(1, 4), notes),
    ),
    max_size=16,
)


def pool_at(path: Path, block_bytes: int = BLOCK_BYTES) -> PoolStore:
    backend = open_backend({"path": str(path / "pool")})
    return PoolStore(backend, PoolKeys("tiny"), block_bytes, PoolSettings(name="directory", deadline_s=20.0))


class Tiers:
    """Host, disk and pool beside a plain table of what each block came with there."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, ManualClock()
        self.host = HostStore(BLOCK_BYTES, 64 * BLOCK_BYTES, make_policy("hazard"), self.clock)
        self.disk, self.pool = self.opened(), pool_at(path)
        self.told: dict[Tier, dict[BlockKey, BlockNotes]] = {Tier.HOST: {}, Tier.DISK: {}, Tier.POOL: {}}

    def opened(self) -> DiskStore:
        policy = make_policy("hazard")
        return DiskStore(self.path / "disk", SPACE, BLOCK_BYTES, size_for(64), policy, self.clock)

    def put(self, store: BlockStore, blocks: Sequence[BlockPut]) -> None:
        store.put_many(blocks)
        for block in blocks:
            self.told[store.tier].setdefault(block.key, BlockNotes(block.hint, block.session))

    def down(self, store: BlockStore) -> None:
        def save(blocks: Sequence[BlockPut]) -> None:
            self.put(store, blocks[::-1])
            for block in blocks:
                assert self.told[Tier.HOST].pop(block.key) == BlockNotes(block.hint, block.session)

        self.host.drop_oldest(5, save)
        self.told[Tier.HOST] = {key: self.told[Tier.HOST][key] for key in self.held_by_host()}

    def held_by_host(self) -> list[BlockKey]:
        known = list(self.told[Tier.HOST])
        return [key for key, is_there in zip(known, self.host.exists_many(known), strict=True) if is_there]

    def renew(self, wanted: Sequence[BlockKey], hint: RetentionHint) -> None:
        for store in (self.host, self.disk):
            told = self.told[store.tier]
            store.renew(dict.fromkeys(wanted, hint))
            told |= {key: replace(told[key], hint=hint) for key in wanted if key in told}

    def restart(self) -> None:
        self.disk.close()
        self.pool.close()
        self.disk, self.pool = self.opened(), pool_at(self.path)

    def check(self) -> None:
        for store in (self.host, self.disk):
            told = self.told[store.tier]
            assert store.notes_many(list(told)) == list(told.values())

    def check_pool(self) -> None:
        told = self.told[Tier.POOL]
        assert read(self.pool, list(told)) == [ReadResult.HIT] * len(told)
        assert self.pool.notes_many(list(told)) == list(told.values())

    def close(self) -> None:
        for store in (self.host, self.disk, self.pool):
            store.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=steps)
def test_like_a_table_of_what_each_block_came_with(steps: list) -> None:
    with TemporaryDirectory() as directory:
        tiers = Tiers(Path(directory))
        for action, *rest in steps:
            if action == "put":
                name, length, note = rest
                made = [replace(b, hint=note.hint, session=note.session) for b in chain(name, length)]
                tiers.put(tiers.host, made)
            elif action == "renew":
                name, length, note = rest
                tiers.renew(keys(chain(name, length)), note.hint)
            elif action == "restart":
                tiers.restart()
            elif action == "read":
                tiers.check_pool()
            else:
                tiers.down(tiers.disk if action == "down" else tiers.pool)
            tiers.check()
        tiers.restart()
        tiers.check()
        tiers.check_pool()
        tiers.close()


def test_prefetched_blocks_bring_them_to_the_host_tier(tmp_path: Path) -> None:
    """From the disk, and from a pool that another server wrote."""
    note = BlockNotes(RetentionHint(90, 5000.0), 7)
    for tier in (Tier.DISK, Tier.POOL):
        rig = Rig(tmp_path)
        below: Callable[[], BlockStore] = rig.disk if tier is Tier.DISK else lambda: pool_at(tmp_path, BLOCK)
        writer = rig.open(below())
        blocks = [replace(block, hint=note.hint, session=note.session) for block in rig.fill("a", 3)]
        writer.on_commit(blocks)
        assert writer.drain(TIMEOUT_S)
        writer.close()
        transfer = rig.open(rig.host(8), below(), ask_always=True)
        wanted = [block.key for block in blocks]
        ahead = transfer.prefetch(ROOT, wanted)
        assert ahead is not None
        ahead.probe.result(TIMEOUT_S)
        host = transfer.stores[0]
        while not all(host.exists_many(wanted)):
            pass
        assert host.notes_many(wanted) == [note] * 3
        transfer.close()


def test_a_value_of_an_older_version_says_nothing() -> None:
    """It has zeros there, under a checksum of its own."""
    payload, header = memoryview(b"payload"), bytearray(HEADER_BYTES)
    seal("key", payload, memoryview(header), BlockNotes(RetentionHint(90, 5.0), 7))
    header[10:16] = bytes(6)
    header[48:56] = bytes(8)
    header[56:] = xxhash.xxh3_64_intdigest(bytes(header[:56])).to_bytes(8, "little")
    assert damage("key", memoryview(header), payload) is None
    assert notes_in(memoryview(header)) == NO_NOTES


def test_a_record_without_a_session_is_that_of_the_version_before() -> None:
    """Its length had eight bytes: old files are read, and read by that version too."""
    key = key_of("a")
    record = Record(3, key, ROOT, 5, 6, len(bytes_of(key)), "", 1.0)
    packed = record.pack()
    assert len(packed) == RECORD_BYTES
    assert int.from_bytes(packed[88:96], "little") == len(bytes_of(key))
    assert replace(record, session=9).pack()[92:96] == (9).to_bytes(4, "little")


def test_blocks_go_down_again_as_those_of_the_session_that_left_them() -> None:
    """Whoever loads them; what somebody else computes behind is his."""
    tiers = DictTiers()
    came_with: dict[BlockKey, BlockNotes] = {}
    tiers.notes = lambda keys: [came_with.get(key, NO_NOTES) for key in keys]  # type: ignore[method-assign]
    cache = make_cache(4, 4, lower=tiers)
    tiers.buffer = buffer_of(cache)
    lease = reserved(cache, NS, tokens(range(9)), session=7)
    compute_all(cache, lease)
    cache.free(lease, 9)
    assert {block.session for block in tiers.committed} == {7}
    run(cache, tokens(range(900, 915)))
    came_with = {block.key: BlockNotes(session=block.session) for block in tiers.evicted}
    lease = reserved(cache, NS, tokens(range(8), range(50, 56)), session=8)
    tiers.finish()
    cache.finish_load(lease)
    tiers.evicted.clear()
    compute_all(cache, lease)
    cache.free(lease, 14)
    run(cache, tokens(range(900, 915)))
    assert {block.key: block.session for block in tiers.evicted} == {
        lease.key(0): 7,
        lease.key(1): 7,
        lease.key(2): 8,
        **{block.key: 8 for block in tiers.evicted if block.num_tokens < 4},
    }
