"""What a server keeps on disk beside blocks, for `stemma cache`: the usage ledger, and what packages keep.

A package registers a `Kept` in the entry point group ``stemma.kept``, under the file's name by which its
directories are known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import typer

from stemma import guests
from stemma.errors import ConfigError

GROUP = "stemma.kept"
_BROUGHT_BY = {"batches.db": "stemma-batch"}
"""By a file of the directory: the package of Stemma's repository that keeps it."""


class Kept(Protocol):
    """Shows and cleans directories of one kind. Each raises StorageError."""

    def shown(self, path: Path) -> Iterator[str]:
        """Yield lines on what is there."""

    def drop_older(self, path: Path, before: float) -> str:
        """Drop what is older than `before`, in seconds since 1970, and say so."""


def is_beside_blocks(path: Path) -> bool:
    """Whether a path is a ledger's file or a directory that a package keeps, and none of blocks."""
    return path.is_file() or _mark(path) is not None


def show_kept(path: Path) -> None:
    """Print what is there. Raises StorageError if it can't be read, or a server holds it."""
    if path.is_file():
        from stemma.insight.ledger import sqlite_url, total, usage

        num_requests = total(usage(sqlite_url(path), "day")).num_requests
        typer.echo(f"{path.name}  {num_requests} requests in the ledger")
        return
    for line in _keeper(path).shown(path):
        typer.echo(line)


def drop_kept(path: Path, age_s: float) -> None:
    """Drop what is older. Raises StorageError if it can't be written, or a server holds it."""
    before = time.time() - age_s
    if path.is_file():
        from stemma.insight.ledger import drop_older, sqlite_url

        typer.echo(f"{path.name}: {drop_older(sqlite_url(path), before)} requests dropped from the ledger")
        return
    typer.echo(_keeper(path).drop_older(path, before))


def _mark(path: Path) -> str | None:
    return next((name for name in {*_BROUGHT_BY, *guests.names(GROUP)} if (path / name).exists()), None)


def _keeper(path: Path) -> Kept:
    """Return what knows a directory. Raises ConfigError if its package isn't installed, or is broken."""
    name = _mark(path)
    assert name is not None
    keeper: Kept | None = guests.load(GROUP, name)
    if keeper is None:
        raise ConfigError(f"{path} is kept by {guests.to_install(_BROUGHT_BY[name])}")
    return keeper
