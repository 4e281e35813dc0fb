"""Growth of the disk tier: slow, failing, or at a directory that isn't what it was."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from tests.contracts.block_store_suite import chain, keys, read
from tests.memory.faulty_files import FaultyFiles
from tests.memory.manual_clock import ManualClock
from tests.memory.tiers.small_disks import make_disk

from stemma.errors import StorageError
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.disk.disk_store import BACK_OFF_S
from stemma.memory.tiers.disk.spaces import INDEX, LOCK, MANIFEST, list_spaces


class _SlowFiles(FaultyFiles):
    """A file system that takes as long to reserve space as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.is_growing = threading.Event()
        self.may_end = threading.Event()

    def allocate(self, fd: int, num_bytes: int) -> None:
        self.is_growing.set()
        assert self.may_end.wait(10.0)
        super().allocate(fd, num_bytes)


def test_nobody_waits_for_a_slab_that_is_added_slowly(tmp_path: Path) -> None:
    """The step loop and the event loop look up, pin and read while the file system reserves space."""
    files = _SlowFiles()
    store = make_disk(tmp_path, 8, files=files)
    blocks = chain("a", 2)
    results: list[PutResult] = []
    writer = threading.Thread(target=lambda: results.extend(store.put_many(blocks)))
    writer.start()
    assert files.is_growing.wait(10.0)
    answers: list[object] = []
    reader = threading.Thread(
        target=lambda: answers.extend(
            (store.pin(keys(blocks)), store.clear(), store.expire(), read(store, keys(blocks)))
        )
    )
    reader.start()
    reader.join(5.0)
    assert answers == [[False, False], 0, 0, [ReadResult.MISS] * 2]
    files.may_end.set()
    writer.join(10.0)
    assert results == [PutResult.STORED] * 2
    store.close()


def test_a_clock_that_is_set_back_does_not_prolong_the_back_off(tmp_path: Path) -> None:
    clock, monotonic, files = ManualClock(10_000.0), ManualClock(50.0), FaultyFiles()
    store = make_disk(tmp_path, 8, clock=clock, files=files, monotonic=monotonic)
    store.put_many(chain("a", 1))
    files.write_errno = errno.ENOSPC
    assert store.put_many(chain("b", 1)) == [PutResult.NO_SPACE]
    files.write_errno = 0
    clock.now -= 3600.0
    monotonic.now += BACK_OFF_S
    assert store.put_many(chain("b", 1)) == [PutResult.STORED]
    store.close()


def test_a_root_that_cannot_be_listed_costs_a_back_off_and_no_pins(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    root = tmp_path / "cache"
    store = make_disk(root, 4, clock=clock)
    root.rename(tmp_path / "moved")
    for _ in range(3):
        assert store.put_many(chain("a", 3)) == [PutResult.NO_SPACE] * 3
    assert store.counters.reasons["unlistable"] == 1
    (tmp_path / "moved").rename(root)
    clock.now += BACK_OFF_S
    assert store.put_many(chain("b", 4)) == [PutResult.STORED] * 4
    store.check()
    assert store.clear() == 4
    store.close()


@pytest.mark.parametrize("name", [INDEX, LOCK, "slab-00000"])
def test_a_symbolic_link_in_the_directory_is_not_followed(tmp_path: Path, name: str) -> None:
    store = make_disk(tmp_path / "cache", 4)
    store.put_many(chain("a", 4))
    path = store.path
    store.close()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 100)
    (path / name).unlink()
    (path / name).symlink_to(victim)
    with pytest.raises(StorageError):
        make_disk(tmp_path / "cache", 4)
    list_spaces(tmp_path / "cache")
    assert victim.read_bytes() == b"precious" * 100


def test_a_manifest_is_written_beside_a_link_not_through_it(tmp_path: Path) -> None:
    store = make_disk(tmp_path / "cache", 4)
    path = store.path
    store.close()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (path / MANIFEST).unlink()
    (path / (MANIFEST + ".new")).symlink_to(victim)
    make_disk(tmp_path / "cache", 4).close()
    assert victim.read_bytes() == b"precious"
    assert not (path / MANIFEST).is_symlink()
