"""Files are asked for whole, and one that can't be opened is somebody else's error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stemma.native import read_ahead as tested
from stemma.native.read_ahead import read_ahead
from stemma.supervision import Supervisor

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise")


class Failing(Supervisor):
    """A supervisor that keeps what it is told."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def on_thread_failure(self, name: str, error: BaseException) -> None:
        self.errors.append(error)


def test_whole_files_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a": 10, "b": 0, "c": 25}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    asked: list[tuple[str, range]] = []

    def note(descriptor: int, begin: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        asked.append((name, range(begin, begin + length)))

    monkeypatch.setattr(os, "posix_fadvise", note)
    monkeypatch.setattr(tested, "AT_ONCE_BYTES", 10)
    supervisor = Failing()
    thread = read_ahead([tmp_path / name for name in ("a", "none", "b", "c")], supervisor)
    assert thread is not None
    thread.join()
    found = {name: {at for each, part in asked if each == name for at in part} for name in sizes}
    assert not supervisor.errors
    assert all(set(range(size)) <= found[name] for name, size in sizes.items())


def test_a_file_is_asked_for_by_the_system(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(100_000))
    supervisor = Failing()
    thread = read_ahead([file], supervisor)
    assert thread is not None
    thread.join()
    assert not supervisor.errors
