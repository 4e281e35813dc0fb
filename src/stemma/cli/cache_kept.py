"""What a server keeps on disk beside blocks, for `stemma cache`: files of batches, and the usage ledger."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from stemma.config.sizes import format_size
from stemma.errors import StorageError

_UNBOUNDED = 1 << 62


def is_beside_blocks(path: Path) -> bool:
    """Whether a path is a directory of batches or a ledger's file, and no directory of blocks."""
    from stemma.server.batches.store import DATABASE

    return path.is_file() or (path / DATABASE).exists()


def show_kept(path: Path) -> None:
    """Print what is there. Raises StorageError if it can't be read, or a server holds it."""
    if path.is_file():
        from stemma.insight.ledger import sqlite_url, total, usage

        typer.echo(
            f"{path.name}  {total(usage(sqlite_url(path), 'day')).num_requests} requests in the ledger"
        )
        return
    from stemma.budgets import Budget
    from stemma.server.batches.store import BatchStore

    store = BatchStore(path, Budget("batches", "bytes", _UNBOUNDED))
    counts = store.counts()
    store.close()
    typer.echo(
        f"{path.name}  {counts['batches']} batches, {counts['files']} files of {format_size(counts['bytes'])}"
    )
    if counts["unreadable"]:
        typer.echo(
            f"    {counts['unreadable']} batches can't be read; `stemma cache gc --unused-for` drops them"
        )


def drop_kept(path: Path, age_s: float) -> None:
    """Drop what is older. Raises StorageError if it can't be written, or a server holds it."""
    before = time.time() - age_s
    if path.is_file():
        from stemma.insight.ledger import drop_older, sqlite_url

        typer.echo(f"{path.name}: {drop_older(sqlite_url(path), before)} requests dropped from the ledger")
        return
    import sqlite3

    from stemma.budgets import Budget
    from stemma.server.batches.store import BatchStore

    store = BatchStore(path, Budget("batches", "bytes", _UNBOUNDED))
    try:
        typer.echo(f"{path.name}: {store.drop_older(before)} files of batches dropped")
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"{path}: {error}") from error
    finally:
        store.close()
