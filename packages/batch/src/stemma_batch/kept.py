"""What the entry point ``stemma.kept`` names: a directory of batches, for `stemma cache`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from stemma.budgets import Budget
from stemma.config.sizes import format_size
from stemma.errors import StorageError
from stemma_batch.store import BatchStore

_UNBOUNDED = 1 << 62


def shown(path: Path) -> Iterator[str]:
    """Yield lines on what is there. Raises StorageError if it can't be read, or a server holds it."""
    store = BatchStore(path, Budget("batches", "bytes", _UNBOUNDED))
    counts = store.counts()
    store.close()
    size = format_size(counts["bytes"])
    yield f"{path.name}  {counts['batches']} batches, {counts['files']} files of {size}"
    if counts["unreadable"]:
        yield f"    {counts['unreadable']} batches can't be read; `stemma cache gc --unused-for` drops them"


def drop_older(path: Path, before: float) -> str:
    """Drop what is older, and say so. Raises StorageError if it can't be written, or a server holds it."""
    store = BatchStore(path, Budget("batches", "bytes", _UNBOUNDED))
    try:
        return f"{path.name}: {store.drop_older(before)} files of batches dropped"
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"{path}: {error}") from error
    finally:
        store.close()
