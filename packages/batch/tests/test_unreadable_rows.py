"""Rows that can't be read are set aside and told; `stemma cache` sees what is kept beside blocks."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stemma import guests
from stemma.budgets import Budget
from stemma.cli import make_app
from stemma.errors import NotFound, StorageError
from stemma_batch.records import BATCH_PURPOSE, Batch, StoredFile
from stemma_batch.store import DATABASE, BatchStore

OLD, NEW, FOREVER = 1000, int(time.time()), 1 << 40
DAMAGED: tuple[Any, ...] = (b"", b"{", b"[]", b'{"status": 7}', b"\xff", "text", 5, None)


def opened(directory: Path) -> BatchStore:
    return BatchStore(directory, Budget("batches", "bytes", 1 << 30))


def stored(directory: Path, *names: str) -> None:
    store = opened(directory)
    for name in names:
        file = StoredFile(
            f"file-{name}", "ada", name, BATCH_PURPOSE, 2, OLD if name == "old" else NEW, 1 << 40
        )
        store.path_of(file.file_id).write_bytes(b"{}")
        store.add_file(file)
        store.add_batch(
            Batch(name, "ada", "/v1/chat/completions", file.file_id, "24h", file.created_at, 1 << 40)
        )
    store.close()


@pytest.mark.parametrize("content", DAMAGED)
def test_a_batch_that_cannot_be_read_is_set_aside(
    tmp_path: Path, content: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, "one", "two")
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("UPDATE batches SET content = ? WHERE id = 'one'", (content,))
    database.close()
    store = opened(tmp_path)
    assert [batch.batch_id for batch in store.open_batches()] == ["two"]
    assert [batch.batch_id for batch in store.list_batches("ada")] == ["two"]
    with pytest.raises(NotFound):
        store.batch("ada", "one")
    store.drop_expired(NEW)
    assert store.counts() == {"files": 2, "batches": 1, "unreadable": 1, "bytes": 4}
    store.close()
    assert "batch one can't be read and is set aside" in caplog.text
    shown = cache("ls", str(tmp_path))
    assert "1 batches, 2 files of 4 B" in shown
    assert "1 batches can't be read" in shown


def cache(*arguments: str) -> str:
    result = CliRunner().invoke(make_app(), ["cache", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_what_is_old_goes(tmp_path: Path) -> None:
    stored(tmp_path, "old", "new")
    store = opened(tmp_path)
    result = CliRunner().invoke(make_app(), ["cache", "gc", str(tmp_path), "--unused-for", "7d"])
    assert isinstance(result.exception, StorageError)  # a server holds it
    store.close()
    assert "1 files of batches dropped" in cache("gc", str(tmp_path), "--unused-for", "7d")
    assert not (tmp_path / "files" / "file-old").exists()
    assert "2 batches, 1 files" in cache(
        "ls", str(tmp_path)
    )  # an open batch stays, and will say why it fails


def test_the_core_knows_such_a_directory_and_says_what_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, "one")
    monkeypatch.setattr(guests, "entry_points", lambda **_: [])
    result = CliRunner().invoke(make_app(), ["cache", "ls", str(tmp_path)])
    assert "pip install ./packages/batch" in str(result.exception)
