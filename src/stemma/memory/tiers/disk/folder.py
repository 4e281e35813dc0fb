"""Whether a directory can be written into, before anything is made there."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory that Stemma writes into."""

    path: str
    free_bytes: int | None
    problem: str | None
    """Why it can't be used; None: it can."""


def examine_folder(path: Path) -> Folder:
    """Try to write into a directory, or into the one that it would be made in. Makes no directory."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        free = shutil.disk_usage(existing).free
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"stemma")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Folder(str(path), None, f"can't write into {existing}: {error.strerror or error}")
    return Folder(str(path), free, None)
