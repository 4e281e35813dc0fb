"""The disk tier with its process killed and its files damaged behind its back.

In all cases: reads that hit carry the right bytes (`read` proves it), others are counted with their reason,
and the space is usable again.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stemma.errors import StorageError
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.disk.disk_store import BACK_OFF_S
from stemma.memory.tiers.disk.record import RECORD_BYTES
from stemma.memory.tiers.disk.spaces import INDEX
from tests.contracts.block_store_suite import BLOCK_BYTES, chain, keys, read
from tests.faults.disk_writer import CAPACITY
from tests.memory.faulty_files import FaultyFiles
from tests.memory.manual_clock import ManualClock
from tests.memory.tiers.small_disks import SLOT_BYTES, allocated_bytes, make_disk, size_for

EVERYTHING = [key for name in range(40) for key in keys(chain(name, 5))]


def kill_a_writer(root: Path, seed: int) -> None:
    command = [sys.executable, "-m", "tests.faults.disk_writer", str(root), str(seed)]
    repository = Path(__file__).parents[2]
    path = os.pathsep.join([str(repository / "src"), str(repository)])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=repository, env=os.environ | {"PYTHONPATH": path}
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    time.sleep(random.Random(seed).random() * 0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def survive_kills(root: Path, rounds: int) -> None:
    for seed in range(rounds):
        kill_a_writer(root, seed)
        store = make_disk(root, CAPACITY)
        num_blocks = store.num_blocks
        results = read(store, EVERYTHING)
        assert results.count(ReadResult.HIT) + results.count(ReadResult.CORRUPT) == num_blocks
        assert results.count(ReadResult.HIT) > 0
        assert store.num_blocks == results.count(ReadResult.HIT)
        store.check()
        store.close()
        assert allocated_bytes(root) <= size_for(CAPACITY)
    # The space came back: the store fills up to the brim again.
    store = make_disk(root, CAPACITY)
    for name in range(100, 120):
        assert store.put_many(chain(name, 4)) == [PutResult.STORED] * 4
    assert store.num_blocks == CAPACITY
    store.close()


def test_kill_9_while_writing(tmp_path: Path) -> None:
    survive_kills(tmp_path, 4)


@pytest.mark.slow
def test_kill_9_while_writing_50_rounds(tmp_path: Path) -> None:
    survive_kills(tmp_path, 50)


@pytest.mark.parametrize("torn_at", [0, 1, RECORD_BYTES, RECORD_BYTES + 1, 2048, SLOT_BYTES - 1])
def test_a_torn_write_is_never_read(tmp_path: Path, torn_at: int) -> None:
    """The slot of an old block is half overwritten, and its old record still stands in the index file."""
    old, new = chain("old", 1), chain("new", 1)
    files = FaultyFiles()
    store = make_disk(tmp_path, 1, files=files)
    store.put_many(old)
    index_before = (store.path / INDEX).read_bytes()
    files.write_torn_at, files.write_errno = torn_at, errno.EIO
    assert store.put_many(new) == [PutResult.ERROR]
    assert store.counters.reasons["eio"] > 0
    path = store.path
    files.write_torn_at, files.write_errno = None, 0
    store.close()
    (path / INDEX).write_bytes(index_before)
    store = make_disk(tmp_path, 1)
    first = read(store, keys(old))
    if torn_at > RECORD_BYTES:
        assert first == [ReadResult.CORRUPT]
        assert store.counters.reasons == {"checksum": 1}
        assert store.num_blocks == 0
    assert read(store, keys(new)) == [ReadResult.MISS]
    assert store.put_many(new)[0] in (PutResult.STORED, PutResult.EXISTS)
    assert read(store, keys(new)) == [ReadResult.HIT]
    store.close()


def test_flipped_bits(tmp_path: Path) -> None:
    blocks = chain("a", 16)
    store = make_disk(tmp_path, 16)
    store.put_many(blocks)
    rng = random.Random(5)
    damaged = set()
    with next(iter(store.path.glob("slab-*"))).open("r+b") as slab:
        for _ in range(6):
            at = rng.randrange(16 * SLOT_BYTES)
            slab.seek(at)
            byte = slab.read(1)[0]
            slab.seek(at)
            slab.write(bytes([byte ^ 1 << rng.randrange(8)]))
            if RECORD_BYTES <= at % SLOT_BYTES < RECORD_BYTES + BLOCK_BYTES:
                damaged.add(at // SLOT_BYTES)
    results = read(store, keys(blocks))
    assert {n for n, result in enumerate(results) if result is ReadResult.CORRUPT} == damaged
    assert store.counters.reasons["checksum"] == store.counters.reads[ReadResult.CORRUPT] == len(damaged)
    assert read(store, keys(blocks)).count(ReadResult.MISS) == len(damaged)
    assert set(store.put_many(blocks)) == {PutResult.EXISTS, PutResult.STORED}
    assert read(store, keys(blocks)) == [ReadResult.HIT] * 16
    store.close()


@pytest.mark.parametrize("restart", [False, True])
def test_a_truncated_slab(tmp_path: Path, restart: bool) -> None:
    blocks = chain("a", 8)
    store = make_disk(tmp_path, 8)
    store.put_many(blocks)
    slab = next(iter(store.path.glob("slab-*")))
    os.truncate(slab, 3 * SLOT_BYTES + 100)
    reason = "truncated"
    if restart:
        store.close()
        store = make_disk(tmp_path, 8)
        reason = "slab_truncated"
    results = read(store, keys(blocks))
    lost = ReadResult.MISS if restart else ReadResult.CORRUPT
    assert results == [ReadResult.HIT] * 3 + [lost] * 5
    assert store.counters.reasons[reason] == 5
    assert store.put_many(blocks) == [PutResult.EXISTS] * 3 + [PutResult.STORED] * 5
    assert read(store, keys(blocks)) == [ReadResult.HIT] * 8
    store.close()


def test_a_damaged_or_missing_index_is_rebuilt_from_the_slabs(tmp_path: Path) -> None:
    blocks = chain("a", 8)
    store = make_disk(tmp_path, 8)
    store.put_many(blocks)
    index = store.path / INDEX
    store.close()
    os.truncate(index, 2 * RECORD_BYTES + 5)
    store = make_disk(tmp_path, 8)
    assert store.counters.reasons["index_truncated"] == 1
    assert read(store, keys(blocks)) == [ReadResult.HIT] * 8
    store.close()
    index.unlink()
    store = make_disk(tmp_path, 8)
    assert read(store, keys(blocks)) == [ReadResult.HIT] * 8
    store.close()
    with index.open("r+b") as file:
        file.seek(3 * RECORD_BYTES + 20)
        file.write(b"#")
    store = make_disk(tmp_path, 8)
    assert read(store, keys(blocks)).count(ReadResult.MISS) == 1
    store.check()
    store.close()


def test_a_slab_deleted_between_runs(tmp_path: Path) -> None:
    store = make_disk(tmp_path, 8)
    store.put_many(chain("a", 8))
    slab = next(iter(store.path.glob("slab-*")))
    store.close()
    slab.unlink()
    store = make_disk(tmp_path, 8)
    assert read(store, keys(chain("a", 8))) == [ReadResult.MISS] * 8
    assert store.put_many(chain("a", 8)) == [PutResult.STORED] * 8
    store.check()
    store.close()


def test_no_space_for_a_slab(tmp_path: Path) -> None:
    clock, files = ManualClock(1000.0), FaultyFiles()
    files.allocate_errno = 0
    store = make_disk(tmp_path, 8, clock=clock, files=files)
    files.allocate_errno = errno.ENOSPC
    assert store.put_many(chain("a", 2)) == [PutResult.NO_SPACE] * 2
    assert store.counters.reasons["enospc"] == 1
    files.allocate_errno = 0
    assert store.put_many(chain("a", 2)) == [PutResult.NO_SPACE] * 2
    clock.now += BACK_OFF_S
    assert store.put_many(chain("a", 2)) == [PutResult.STORED] * 2
    store.close()


@pytest.mark.parametrize(
    ("number", "result", "reason"),
    [
        (errno.ENOSPC, PutResult.NO_SPACE, "enospc"),
        (errno.EIO, PutResult.ERROR, "eio"),
        (errno.EROFS, PutResult.ERROR, "read_only"),
    ],
)
def test_a_failing_write_costs_one_block_and_then_waits(
    tmp_path: Path, number: int, result: PutResult, reason: str
) -> None:
    clock, files = ManualClock(1000.0), FaultyFiles()
    store = make_disk(tmp_path, 4, clock=clock, files=files)
    store.put_many(chain("a", 4))
    files.write_errno = number
    assert store.put_many(chain("b", 1)) == [result]
    assert store.counters.reasons[reason] >= 1
    assert store.put_many(chain("c", 1)) == [PutResult.DROPPED]
    assert store.counters.reasons["backing_off"] == 1
    assert read(store, keys(chain("a", 4))) == [ReadResult.HIT] * 3 + [ReadResult.MISS]
    files.write_errno = 0
    clock.now += BACK_OFF_S
    assert store.put_many(chain("c", 1)) == [PutResult.STORED]
    store.check()
    store.close()


def test_a_failing_read_is_a_counted_miss(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = make_disk(tmp_path, 4, files=files)
    store.put_many(chain("a", 1))
    files.read_errno = errno.EIO
    assert read(store, keys(chain("a", 1))) == [ReadResult.ERROR]
    assert store.counters.reasons == {"eio": 1}
    store.close()


def in_child(work: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run `work` in a process that file permissions bind (root is exempt from them)."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from stemma.errors import StorageError\n"
        "from stemma.memory.tiers.block_store import PutResult, ReadResult\n"
        "from tests.contracts.block_store_suite import chain, keys, read\n"
        "from tests.memory.tiers.small_disks import make_disk\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        f"root = Path({str(root)!r})\n" + work
    )
    repository = Path(__file__).parents[2]
    path = os.pathsep.join([str(repository / "src"), str(repository)])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=repository,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )


def make_readable(root: Path, mode: int) -> None:
    """Let the unprivileged child reach `root`, which it may read but not write."""
    for parent in root.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/") and "pytest" in str(parent):
            parent.chmod(0o755)
    for path in [root, *root.rglob("*")]:
        path.chmod(mode if path.is_dir() else mode & 0o666)


def test_a_read_only_directory_is_served_but_not_written(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    store = make_disk(root, 8)
    store.put_many(chain("a", 3))
    store.close()
    make_readable(root, 0o555)
    done = in_child(
        "store = make_disk(root, 8)\n"
        "assert store.read_only\n"
        "assert read(store, keys(chain('a', 3))) == [ReadResult.HIT] * 3\n"
        "assert store.put_many(chain('b', 1)) == [PutResult.DROPPED]\n"
        "assert store.counters.reasons == {'read_only': 1}\n"
        "store.close()\n",
        root,
    )
    make_readable(root, 0o755)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", [0o555, 0o700], ids=["read-only", "closed to others"])
def test_an_empty_directory_of_another_user_is_refused_with_its_name(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    make_readable(root, mode)
    done = in_child(
        "try:\n    make_disk(root, 8)\nexcept StorageError as error:\n    print(error)\n",
        root,
    )
    root.chmod(0o755)
    assert str(root) in done.stdout, done.stderr
    assert StorageError.__name__ not in done.stderr
