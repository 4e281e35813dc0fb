"""The engine above a file system that is really full or really read-only: answers equal the cache-off run.

Needs the right to mount a tmpfs (root); `test_tiers.py` injects the same errors where there is none.
"""

from __future__ import annotations

import io
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stemma.memory.tiers.disk.disk_store as disk_store
from stemma.types import Tier
from tests.engine.harness import Harness, greedy, prompt
from tests.engine.tier_rounds import cached, disk, expected, round_of, serve

__all__ = ["expected", "serve"]  # fixtures

Serve = Callable[..., Harness]


def mount(*arguments: object) -> bool:
    command = ["mount", *map(str, arguments)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def fill(file: io.RawIOBase) -> None:
    while True:
        file.write(bytes(4096))


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    path = tmp_path / "volume"
    path.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=1M", "tmpfs", path):
        pytest.skip("may not mount a tmpfs here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_without_room_for_the_first_slab(serve: Serve, expected, volume: Path) -> None:
    one = serve(disk_cache=volume, disk_cache_size="10MB")
    for _ in range(2):
        assert cached(round_of(one, expected), Tier.DISK) == [0] * 5
    assert disk(one).counters.reasons["enospc"] > 0
    assert disk(one).num_blocks == 0


def test_a_disk_that_others_fill_up_and_clear_again(
    serve: Serve, expected, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "BACK_OFF_S", 0.3)
    one = serve(disk_cache=volume, disk_cache_size="600kB")
    junk = volume / "junk"
    with junk.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        fill(file)
    round_of(one, expected)
    round_of(one, expected)
    assert disk(one).counters.reasons["enospc"] > 0
    junk.unlink()
    time.sleep(0.5)
    round_of(one, expected)
    assert cached(round_of(one, expected), Tier.DISK) == [96] * 5


def test_a_volume_remounted_read_only(serve: Serve, expected, volume: Path) -> None:
    one = serve(disk_cache=volume, disk_cache_size="700kB")
    round_of(one, expected)
    one.engine.close()
    assert mount("-o", "remount,ro", volume)
    two = serve(disk_cache=volume, disk_cache_size="700kB")
    assert disk(two).read_only
    assert cached(round_of(two, expected), Tier.DISK) == [96] * 5
    fresh = prompt(77, 100)
    assert two.serve(fresh, greedy(4)).token_ids[0] == expected(fresh)
    deadline = time.monotonic() + 10.0  # the write is refused in a thread of the tier
    while not disk(two).counters.reasons["read_only"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert disk(two).counters.reasons["read_only"] > 0
    assert disk(two).num_blocks == 30
