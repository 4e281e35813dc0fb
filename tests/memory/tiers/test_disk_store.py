from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.block_store_suite import BLOCK_BYTES, ROOT, LocalStoreContract, chain, key_of, keys, read
from tests.memory.manual_clock import ManualClock
from tests.memory.tiers.small_disks import SLOT_BYTES, SPACE, allocated_bytes, make_disk, size_for

from stemma.errors import ConfigError, StorageError, StorageLocked, StorageMismatch
from stemma.memory.tiers.block_store import BlockPut, PutResult, ReadResult
from stemma.memory.tiers.disk import disk_store, spaces
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.disk.existing import find_space, open_existing, unreadable
from stemma.memory.tiers.disk.record import RECORD_BYTES, Record, block_checksum, sound_records, with_last_use
from stemma.memory.tiers.disk.spaces import (
    MANIFEST,
    Manifest,
    list_spaces,
    new_manifest,
    read_manifest,
    remove_space,
)
from stemma.prefix.keys import KeySpace, owner_tag
from stemma.types import RetentionHint


class TestDiskStore(LocalStoreContract):
    def make_store(self, tmp_path: Path, capacity_blocks: int) -> DiskStore:
        return make_disk(tmp_path, capacity_blocks)


def test_a_restart_finds_everything(tmp_path: Path) -> None:
    blocks = chain("a", 5)
    first = make_disk(tmp_path)
    first.put_many(blocks)
    first.close()
    second = make_disk(tmp_path)
    assert second.num_blocks == 5
    assert read(second, keys(blocks)) == [ReadResult.HIT] * 5
    second.check()
    second.close()


def test_a_restart_without_close_finds_everything(tmp_path: Path) -> None:
    """What kill -9 leaves: the files as they are, nothing flushed on the way out, and no lock held."""
    blocks = chain("a", 5)
    first = make_disk(tmp_path / "killed")
    first.put_many(blocks)
    shutil.copytree(tmp_path / "killed", tmp_path / "left")
    second = make_disk(tmp_path / "left")
    assert read(second, keys(blocks)) == [ReadResult.HIT] * 5
    second.close()
    first.close()


def test_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    first = make_disk(tmp_path, 3, clock=clock)
    a, b, c = (chain(name, 1)[0] for name in "abc")
    first.put_many([a, b, c])
    clock.now = 2000.0
    read(first, [a.key])
    first.close()
    second = make_disk(tmp_path, 3, clock=clock)
    second.put_many(chain("d", 2))
    assert second.exists_many(keys([a, b, c])) == [True, False, False]
    second.close()


def test_removed_and_cleared_blocks_stay_away_after_a_restart(tmp_path: Path) -> None:
    blocks = chain("a", 3)
    store = make_disk(tmp_path)
    store.put_many(blocks)
    store.remove([blocks[2].key])
    store.close()
    store = make_disk(tmp_path)
    assert store.exists_many(keys(blocks)) == [True, True, False]
    assert store.clear() == 2
    assert not list(store.path.glob("slab-*"))
    assert store.put_many(blocks[:1]) == [PutResult.STORED]
    store.close()
    store = make_disk(tmp_path)
    assert store.num_blocks == 1
    store.close()


def test_files_stay_within_the_limit(tmp_path: Path) -> None:
    store = make_disk(tmp_path, 8)
    for name in range(10):
        store.put_many(chain(name, 3))
        assert allocated_bytes(tmp_path) <= size_for(8)
    assert store.num_blocks == 8
    store.check()
    store.close()


def test_a_smaller_limit_after_a_restart_holds(tmp_path: Path) -> None:
    store = make_disk(tmp_path, 8)
    store.put_many(chain("a", 8))
    store.close()
    store = make_disk(tmp_path, 3)
    assert store.num_blocks == 3
    store.put_many(chain("b", 2))
    assert store.num_blocks == 3
    assert allocated_bytes(tmp_path) <= size_for(3) + 8 * RECORD_BYTES
    store.check()
    store.close()


def test_another_model_never_sees_old_bytes(tmp_path: Path) -> None:
    store = make_disk(tmp_path)
    store.put_many(chain("a", 2))
    store.close()
    for space in (
        KeySpace("model-b", "layout-a", 16),
        KeySpace("model-a", "layout-b", 16),
        KeySpace("model-a", "layout-a", 32),
    ):
        other = make_disk(tmp_path, space=space)
        assert other.num_blocks == 0
        other.close()
    assert len(list_spaces(tmp_path)) == 4


def test_another_models_unused_blocks_make_room_for_ours(tmp_path: Path) -> None:
    old = make_disk(tmp_path, 8, space=KeySpace("old", "layout-a", 16))
    old.put_many(chain("a", 8))
    old.close()
    store = make_disk(tmp_path, 8)
    assert store.put_many(chain("b", 8)) == [PutResult.STORED] * 8
    assert [space.path for space in list_spaces(tmp_path)] == [store.path]
    store.close()


def test_another_running_servers_blocks_stay(tmp_path: Path) -> None:
    other = make_disk(tmp_path, 8, space=KeySpace("other", "layout-a", 16))
    other.put_many(chain("a", 8))
    store = make_disk(tmp_path, 8)
    store.put_many(chain("b", 8))
    assert read(other, keys(chain("a", 8))) == [ReadResult.HIT] * 8
    with pytest.raises(StorageLocked):
        remove_space(other.path)
    other.close()
    store.close()


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    store = make_disk(tmp_path)
    with pytest.raises(StorageLocked, match="another server"):
        make_disk(tmp_path)
    store.close()
    make_disk(tmp_path).close()


def test_a_renamed_sub_directory_is_a_mismatch(tmp_path: Path) -> None:
    make_disk(tmp_path).close()
    other = new_manifest(KeySpace("model-b", "layout-a", 16), BLOCK_BYTES, 1 << 20)
    (tmp_path / new_manifest(SPACE, BLOCK_BYTES, 1 << 20).digest).rename(tmp_path / other.digest)
    with pytest.raises(StorageMismatch, match="model_fingerprint is 'model-a', not 'model-b'"):
        make_disk(tmp_path, space=KeySpace("model-b", "layout-a", 16))


def test_a_damaged_manifest_starts_empty(tmp_path: Path) -> None:
    store = make_disk(tmp_path)
    store.put_many(chain("a", 2))
    path = store.path
    store.close()
    (path / MANIFEST).write_text('{"model_fingerprint": ')
    store = make_disk(tmp_path)
    assert store.num_blocks == 0
    assert store.put_many(chain("a", 2)) == [PutResult.STORED] * 2
    store.close()
    assert read_manifest(path) is not None


def test_a_limit_below_one_block_and_an_unusable_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one block"):
        make_disk(tmp_path, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        make_disk(tmp_path / "file")


def test_default_and_own_time_to_live(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    store = make_disk(tmp_path, clock=clock, ttl_s=60.0)
    short, default = chain("short", 1)[0], chain("default", 1)[0]
    store.put_many([BlockPut(short.key, ROOT, short.data, RetentionHint(ttl_s=5.0)), default])
    store.close()
    clock.now = 1010.0
    store = make_disk(tmp_path, clock=clock, ttl_s=60.0)
    assert store.exists_many([short.key, default.key]) == [False, True]
    assert read(store, [short.key, default.key]) == [ReadResult.MISS, ReadResult.HIT]
    assert store.expire() == 1
    clock.now = 1071.0
    assert store.expire() == 1
    assert store.num_blocks == 0
    store.close()


def test_verify_drops_what_is_damaged(tmp_path: Path) -> None:
    store = make_disk(tmp_path)
    store.put_many(chain("a", 3))
    with next(iter(store.path.glob("slab-*"))).open("r+b") as slab:
        slab.seek(SLOT_BYTES + RECORD_BYTES + 7)
        slab.write(b"!")
    assert store.verify() == {"ok": 2, "checksum": 1}
    assert store.verify() == {"ok": 2}
    assert store.counters.reads[ReadResult.HIT] == 0
    store.close()


def test_record_round_trip_and_damage() -> None:
    record = Record(3, key_of("k"), key_of("p"), 9, 77, BLOCK_BYTES, owner_tag("ada"), 2.0)
    packed = record.pack()
    assert len(packed) == RECORD_BYTES
    later = with_last_use(packed, 5.0)
    assert sound_records(memoryview(packed + later), 3, BLOCK_BYTES).tolist() == [0]
    assert sound_records(memoryview(bytes(RECORD_BYTES) + later), 2, BLOCK_BYTES).tolist() == [1]
    for at in range(0, RECORD_BYTES, 5):
        damaged = bytearray(packed)
        damaged[at] ^= 4
        assert not len(sound_records(memoryview(damaged), 3, BLOCK_BYTES))


def test_a_checksum_is_bound_to_key_and_generation() -> None:
    data = memoryview(bytes(64))
    sums = {block_checksum(key_of(k), g, data) for k in "ab" for g in (1, 2)}
    assert len(sums) == 4


def test_the_manifest_is_readable_json(tmp_path: Path) -> None:
    store = make_disk(tmp_path)
    fields = json.loads((store.path / MANIFEST).read_text())
    assert fields["model_fingerprint"] == "model-a"
    assert fields["block_bytes"] == BLOCK_BYTES
    store.close()


def test_owners_and_quotas_outlive_a_restart(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    store = make_disk(tmp_path, clock=clock)
    ada, bob = owner_tag("ada"), owner_tag("bob")
    for n, owner in enumerate((ada, bob, "")):
        clock.now += 1.0
        store.put_many([replace(block, owner=owner) for block in chain(owner or "none", 4 + n)])
    store.close()
    store = make_disk(tmp_path, clock=clock)
    store.set_quotas({ada: 1, bob: 3})
    assert [store.exists_many(keys(chain(ada, 4))), store.exists_many(keys(chain(bob, 5)))] == [
        [True, False, False, False],
        [True, True, True, False, False],
    ]
    assert all(store.exists_many(keys(chain("none", 6))))
    store.check()
    store.close()
    store = make_disk(tmp_path, clock=clock)
    assert store.num_blocks == 1 + 3 + 6
    store.close()


def test_a_directory_of_an_older_format_is_left_alone_until_its_room_is_needed(tmp_path: Path) -> None:
    """A server uses another sub-directory; `stemma cache` says why it can't read the old one."""
    store = make_disk(tmp_path)
    store.put_many(chain("a", 3))
    manifest = store.path / MANIFEST
    store.close()
    older = json.loads(manifest.read_text()) | {"disk_format": 1}
    old = store.path.rename(tmp_path / ("0" * 16))
    (old / MANIFEST).write_text(json.dumps(older))
    [found] = list_spaces(tmp_path)
    assert "has format 1.1, this version reads 2.1" in (unreadable(found) or "")
    with pytest.raises(StorageError, match="`stemma cache clear` removes it"):
        open_existing(find_space(tmp_path, None))
    store = make_disk(tmp_path)
    assert store.num_blocks == 0
    assert old.exists()
    store.put_many(chain("b", 3))
    assert store.num_blocks == 3
    store.close()
    assert not list(old.glob("slab-*"))  # the first slab needed its room


def same_model(layout: str) -> KeySpace:
    return KeySpace(SPACE.model_fingerprint, layout, SPACE.block_size)


def small_slabs(monkeypatch: pytest.MonkeyPatch, num_slots: int) -> None:
    """As in a directory that holds many slabs."""
    made = spaces.new_manifest

    def small(*arguments: Any) -> Manifest:
        return replace(made(*arguments), slots_per_slab=num_slots)

    for module in (spaces, disk_store):
        monkeypatch.setattr(module, "new_manifest", small)


def test_an_upgrade_and_a_rollback_share_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each version keeps half of it, and neither more than all."""
    small_slabs(monkeypatch, 4)
    old = make_disk(tmp_path, 32, space=same_model("by version 1"))
    assert old.put_many(chain("a", 32)) == [PutResult.STORED] * 32
    old.close()
    new = make_disk(tmp_path, 32, space=same_model("by version 2"))
    new.put_many(chain("b", 32))
    assert 12 <= new.num_blocks <= 20
    new.close()
    assert sum(space.allocated_bytes for space in list_spaces(tmp_path)) <= size_for(32) + (8 << 10)
    back = make_disk(tmp_path, 32, space=same_model("by version 1"))
    assert 12 <= back.num_blocks <= 20
    found = read(back, keys(chain("a", 32)))
    assert found.count(ReadResult.HIT) == back.num_blocks
    assert set(found) == {ReadResult.HIT, ReadResult.MISS}
    back.close()


def test_what_an_old_version_left_goes_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_slabs(monkeypatch, 4)
    old = make_disk(tmp_path, 32, space=same_model("by version 1"))
    old.put_many(chain("a", 32))
    old.close()
    for file in old.path.iterdir():
        os.utime(file, (1.0, 1.0))
    new = make_disk(tmp_path, 32, space=same_model("by version 2"))
    new.put_many(chain("b", 32))
    assert new.num_blocks == 32
    assert not old.path.exists()
    new.close()
