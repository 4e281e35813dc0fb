"""SGLang's pages on real tiers: read back, damage is a miss, names and models separate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.memory.manual_clock import ManualClock

from stemma.errors import ConfigError
from stemma.memory.tiers.disk.record import RECORD_BYTES
from stemma.memory.tiers.disk.spaces import read_manifest
from stemma.prefix.keys import KeySpace
from stemma_connect.settings import StorageSettings
from stemma_connect.sglang.pages import PageStores

PAGE = 4096
NAMES = [f"{n:064x}" for n in range(6)]
SPACE = KeySpace("weights", "sglang 0:layout", 64)


def page(number: int) -> memoryview:
    return memoryview(bytes([number]) * PAGE)


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(PAGE)) for _ in range(count)]


class Rig:
    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.opened: list[PageStores] = []

    def open(self, *, space: KeySpace = SPACE, tiers: str = "disk", **settings) -> PageStores:
        given = dict(settings)
        if "disk" in tiers:
            given |= {"disk_cache": str(self.tmp_path / "disk"), "disk_cache_size": "2MB"}
        if "pool" in tiers:
            config = self.tmp_path / "pool.json"
            config.write_text(json.dumps({"path": str(self.tmp_path / "pool")}))
            given["pool"] = {"name": "directory", "config": str(config), "staging": "1MB"}
        parsed = StorageSettings.parse(given, where="test")
        self.opened.append(PageStores(parsed, space, PAGE, ManualClock()))
        return self.opened[-1]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for stores in rig.opened:
        stores.close()


@pytest.mark.parametrize("tiers", ["disk", "pool", "disk pool"])
def test_pages_come_back_after_a_restart(rig, tiers):
    first = rig.open(tiers=tiers)
    assert first.write(NAMES[:3], None, [page(n) for n in range(3)]) == [True] * 3
    assert first.write(NAMES[3:4], NAMES[2], [page(3)]) == [True]
    first.close()
    second = rig.open(tiers=tiers)
    assert second.num_leading(NAMES) == 4
    into = buffers(6)
    assert second.read(NAMES, into) == [True] * 4 + [False] * 2
    assert into[:4] == [page(n) for n in range(4)]


def test_damaged_pages_are_missed_and_counted_and_another_tier_helps(rig):
    stores = rig.open(tiers="disk pool")
    stores.write(NAMES[:2], None, [page(0), page(1)])
    (folder,) = [path for path in (rig.tmp_path / "disk").iterdir() if path.is_dir()]
    manifest = read_manifest(folder)
    assert manifest is not None
    with (folder / "slab-00000").open("r+b") as slab:
        slab.seek(manifest.slot_bytes + RECORD_BYTES)
        slab.write(b"\xff")
    into = buffers(2)
    assert stores.read(NAMES[:2], into) == [True, True]
    assert into == [page(0), page(1)]
    assert (stores.counts()["disk/checksum"], stores.counts()["pool/hit"]) == (1, 1)
    assert stores.num_leading(NAMES[:2]) == 2


def test_another_model_or_layout_finds_nothing(rig):
    rig.open().write(NAMES, None, [page(n) for n in range(6)])
    other = rig.open(space=KeySpace("other weights", SPACE.kv_layout, 64))
    assert other.num_leading(NAMES) == 0
    assert other.key(NAMES[0]) != rig.opened[0].key(NAMES[0])


def test_clear_empties_the_disk(rig):
    stores = rig.open()
    stores.write(NAMES, None, [page(n) for n in range(6)])
    stores.clear()
    assert stores.num_leading(NAMES) == 0


def test_a_tier_is_needed():
    with pytest.raises(ConfigError, match="no tier: give disk_cache or pool"):
        StorageSettings.parse({}, where="test")
