"""The directory backend: contract, several processes, size limit, foreign files."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.pool_backend_suite import (
    VALUE_BYTES,
    PoolBackendContract,
    name_of,
    parts_of,
    read,
)

from stemma.errors import ConfigError, StorageError
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.pool.shared_directory import DirectoryPool, open_backend


class TestDirectoryContract(PoolBackendContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self._path = tmp_path / "pool"

    def open(self) -> DirectoryPool:
        return open_backend({"path": str(self._path)})


def _write_and_read(path: str, seed: int, num_rounds: int) -> None:
    """One of several processes: puts, reads and removes the same few keys; fails on foreign bytes."""
    pool = open_backend({"path": path})
    names = [name_of(n) for n in range(8)]
    for turn in range(num_rounds):
        some = [names[(seed + turn + n) % len(names)] for n in range(4)]
        assert PutResult.ERROR not in pool.put_many(some, [parts_of(name) for name in some])
        assert set(read(pool, some)) <= {ReadResult.HIT, ReadResult.MISS}
        if turn % 3 == seed % 3:
            pool.remove(some[:1])


def test_many_processes_write_read_and_remove_the_same_keys(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_and_read, args=(str(tmp_path), seed, 60)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert not list(tmp_path.rglob(".new-*"))


def test_clients_of_one_process_never_share_a_temporary_file(tmp_path: Path) -> None:
    """As two containers with the same name and process number, which write into the same folder."""
    pools = [open_backend({"path": str(tmp_path)}) for _ in range(2)]
    name, barrier, found = name_of(1), threading.Barrier(2), []

    def write(pool: DirectoryPool) -> None:
        for turn in range(200):
            barrier.wait()
            found.extend(pool.put_many([name], [parts_of(name)]))
            barrier.wait()
            if turn % 2:
                pool.remove([name])

    threads = [threading.Thread(target=write, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert PutResult.ERROR not in found
    assert not list(tmp_path.rglob(".new-*"))


def test_collection_keeps_the_values_used_last(tmp_path: Path) -> None:
    pool = open_backend({"path": str(tmp_path), "capacity": 10 * VALUE_BYTES})
    names = [name_of(n) for n in range(12)]
    pool.put_many(names, [parts_of(name) for name in names])
    pool.wait_for_collection()
    now = time.time()
    assert sum(pool.exists_many(names)) == 9
    survivors = [name for name, there in zip(names, pool.exists_many(names), strict=True) if there]
    for age, name in enumerate(survivors):
        os.utime(tmp_path / name[:2] / name[2:4] / name, (now - 100 * age, now - 100 * age))
    assert read(pool, [survivors[-1]]) == [ReadResult.HIT]  # the oldest one, used now
    extra = [name_of(f"extra {n}") for n in range(3)]
    pool.put_many(extra, [parts_of(name) for name in extra])
    pool.wait_for_collection()
    assert pool.exists_many([survivors[-1], survivors[-2]]) == [True, False]
    assert sum(pool.exists_many([*survivors, *extra])) == 9


def test_a_put_does_not_wait_for_a_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk over millions of files would make it late, and the pool look dead."""
    pool = open_backend({"path": str(tmp_path), "capacity": 10 * VALUE_BYTES})
    gate = threading.Event()
    scandir = os.scandir

    def slow(path: str) -> object:
        assert gate.wait(20)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", slow)
    names = [name_of(n) for n in range(12)]
    assert set(pool.put_many(names, [parts_of(name) for name in names])) == {PutResult.STORED}
    assert all(pool.exists_many(names))
    gate.set()
    pool.wait_for_collection()
    assert sum(pool.exists_many(names)) == 9


def test_collection_removes_expired_values_and_abandoned_files(tmp_path: Path) -> None:
    pool = open_backend({"path": str(tmp_path), "ttl_s": 50})
    old, new = name_of("old"), name_of("new")
    pool.put_many([old, new], [parts_of(old), parts_of(new)])
    directory = tmp_path / old[:2] / old[2:4]
    abandoned = directory / ".new-host-1-1"
    abandoned.write_bytes(b"half a value")
    long_ago = time.time() - 4000
    os.utime(directory / old, (long_ago, long_ago))
    os.utime(abandoned, (long_ago, long_ago))
    collected = pool.collect()
    assert collected is not None
    assert (collected.num_values, collected.num_bytes, collected.num_removed) == (1, VALUE_BYTES, 1)
    assert pool.exists_many([old, new]) == [False, True]
    assert not abandoned.exists()


def test_an_empty_file_is_corrupt(tmp_path: Path) -> None:
    """One that is cut off elsewhere is a shorter value, which its header betrays."""
    pool = open_backend({"path": str(tmp_path)})
    name = name_of("torn")
    pool.put_many([name], [parts_of(name)])
    os.truncate(tmp_path / name[:2] / name[2:4] / name, 0)
    assert read(pool, [name]) == [ReadResult.CORRUPT]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_what_is_no_file_is_corrupt(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A pipe has nobody who writes to it: opening it as a file would wait for ever."""
    pool = open_backend({"path": str(tmp_path)})
    name = name_of(1)
    pool.put_many([name], [parts_of(name)])
    [file] = [path for path in tmp_path.rglob("*") if path.is_file() and path.name == name]
    file.unlink()
    make(file)
    assert read(pool, [name]) == [ReadResult.CORRUPT]


def test_a_directory_that_went_away_is_a_broken_pool_not_an_empty_one(tmp_path: Path) -> None:
    pool = open_backend({"path": str(tmp_path / "mount")})
    (tmp_path / "mount").rmdir()
    with pytest.raises(StorageError, match="gone"):
        pool.exists_many([name_of("a")])


def test_configuration_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absolute"):
        open_backend({"path": "relative"})
    with pytest.raises(ConfigError, match="pathh"):
        open_backend({"pathh": str(tmp_path)})
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        open_backend({"path": str(tmp_path / "file")})


def put(pool: DirectoryPool, names: list[str]) -> list[PutResult]:
    return pool.put_many(names, [parts_of(name) for name in names])


def age(root: Path, name: str, seconds: float) -> None:
    used_at = time.time() - seconds
    os.utime(root / name[:2] / name[2:4] / name, (used_at, used_at))


@pytest.mark.parametrize("capacity", [None, 100 * VALUE_BYTES])
def test_an_expired_value_is_never_served(tmp_path: Path, capacity: int | None) -> None:
    config = {"path": str(tmp_path), "ttl_s": 5}
    pool = open_backend(config | ({"capacity": capacity} if capacity else {}))
    names = [name_of(n) for n in range(20)]
    put(pool, names)
    for name in names:
        age(tmp_path, name, 3600)
    assert pool.exists_many(names) == [False] * 20
    assert read(pool, names) == [ReadResult.MISS] * 20
    assert put(pool, names[:2]) == [PutResult.STORED] * 2  # not EXISTS: it would stay a miss
    assert read(pool, names[:3]) == [ReadResult.HIT, ReadResult.HIT, ReadResult.MISS]


def test_a_time_to_live_counts_from_the_last_use(tmp_path: Path) -> None:
    pool = open_backend({"path": str(tmp_path), "ttl_s": 20})
    name = name_of("a")
    put(pool, [name])
    for _ in range(3):
        age(tmp_path, name, 15)
        assert read(pool, [name]) == [ReadResult.HIT]
        age(tmp_path, name, 15)
        assert put(pool, [name]) == [PutResult.EXISTS]
        assert time.time() - (tmp_path / name[:2] / name[2:4] / name).stat().st_mtime < 10


def test_expired_values_are_collected_without_a_capacity(tmp_path: Path) -> None:
    pool = open_backend({"path": str(tmp_path), "ttl_s": 0.05})
    names = [name_of(n) for n in range(10)]
    put(pool, names)
    for name in names:
        age(tmp_path, name, 100)
    time.sleep(0.1)
    put(pool, [name_of("later")])
    pool.wait_for_collection()
    assert not any((tmp_path / name[:2] / name[2:4] / name).exists() for name in names)


def test_a_full_file_system_without_a_capacity_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_backend({"path": str(tmp_path)})
    names = [name_of(n) for n in range(20)]
    put(pool, names)
    for n, name in enumerate(names):
        age(tmp_path, name, 1000 - n)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        assert put(pool, [name_of("new")]) == [PutResult.NO_SPACE]
        assert put(pool, [name_of("new")]) == [PutResult.NO_SPACE]  # doesn't drop another tenth at once
    pool.wait_for_collection()
    assert pool.exists_many(names) == [False] * 2 + [True] * 18


def test_a_collection_leaves_foreign_files_alone(tmp_path: Path) -> None:
    """The path may be a directory that somebody uses for something else."""
    pool = open_backend({"path": str(tmp_path), "capacity": 2 * VALUE_BYTES, "ttl_s": 1})
    name = name_of("a")
    put(pool, [name])
    pool.wait_for_collection()
    ours = tmp_path / name[:2] / name[2:4]
    foreign = [
        tmp_path / "thesis.tex",
        tmp_path / name,  # a value's name in another place
        ours / "notes",
        ours / name_of("b"),
        tmp_path / "photos" / "2024" / "a.jpg",
        tmp_path / "ab" / "cd" / ("f" * 40),  # a git object
        tmp_path / ".new-style",
    ]
    link = ours / (name[:4] + "0" * 60 + name[64:])
    long_ago = time.time() - 1e6
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"precious")
        os.utime(path, (long_ago, long_ago))
    link.symlink_to(tmp_path / "thesis.tex")
    age(tmp_path, name, 1000)
    collected = pool.collect(make_room=True)
    assert collected is not None
    assert collected.num_removed == 1
    assert all(path.read_bytes() == b"precious" for path in foreign)
    assert link.is_symlink()


def test_files_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    pool = open_backend({"path": str(tmp_path / "pool"), "capacity": 3 * VALUE_BYTES})
    put(pool, [name_of("a"), name_of("b")])
    pool.wait_for_collection()
    files = [path for path in (tmp_path / "pool").rglob("*") if path.is_file()]
    assert len(files) >= 2  # a value, and the collectors' lock
    for path in [tmp_path / "pool", *files]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_value_that_is_stored_anew_while_old_ones_are_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at all values and their removal, which take a while in a large directory."""
    pool = open_backend({"path": str(tmp_path), "ttl_s": 60})
    names = [name_of(n) for n in range(4)]
    put(pool, names)
    for number, name in enumerate(names):
        age(tmp_path, name, 3600 + 60 * number)
    unlink = os.unlink
    stored: list[Any] = []

    def unlink_and_store(path: str) -> None:
        """Remove the oldest; meanwhile others store what comes after it."""
        unlink(path)
        if not stored:
            stored.extend(put(pool, names[:2]))

    monkeypatch.setattr(os, "unlink", unlink_and_store)
    collected = pool.collect()
    assert stored == [PutResult.STORED] * 2
    assert collected is not None
    assert collected.num_removed == 2
    assert read(pool, names) == [ReadResult.HIT, ReadResult.HIT, ReadResult.MISS, ReadResult.MISS]
