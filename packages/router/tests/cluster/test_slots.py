"""Directories that replicas take over from each other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stemma.errors import StorageError, StorageLocked
from stemma_router.cluster.slots import take_slot


def test_a_directory_belongs_to_one_and_then_to_the_next(tmp_path: Path) -> None:
    first, second = take_slot(tmp_path, 2, 0.0), take_slot(tmp_path, 2, 0.0)
    assert first.path != second.path
    assert first.path.is_dir()
    with pytest.raises(StorageLocked, match="stop one"):
        take_slot(tmp_path, 2, 0.0)
    second.close()
    assert take_slot(tmp_path, 2, 0.0).path == second.path


def test_the_last_used_is_taken_first(tmp_path: Path) -> None:
    slots = [take_slot(tmp_path, 3, 0.0) for _ in range(3)]
    for slot in (slots[0], slots[2], slots[1]):
        slot.close()
    assert [take_slot(tmp_path, 3, 0.0).path for _ in range(3)] == [slots[n].path for n in (1, 2, 0)]


def test_who_comes_early_waits_for_the_one_that_ends(tmp_path: Path) -> None:
    held = take_slot(tmp_path, 1, 0.0)
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(take_slot(tmp_path, 1, 60.0)))
    waiting.start()
    held.close()
    waiting.join(60)
    assert [slot.path for slot in taken] == [held.path]


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        take_slot(tmp_path / "file", 1, 0.0)
