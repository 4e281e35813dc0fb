"""Which trace a figure was made with: its name, the digest of its file, and how many requests were read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from stemma.errors import StorageError

_SHOWN = 8
"""Digits of a digest that are shown to people."""


@dataclass(frozen=True, slots=True)
class TraceVersion:
    """What names a trace for good."""

    name: str
    sha256: str
    """Of the file as it is stored, hexadecimal; empty for a trace that was made up."""
    num_requests: int

    def __str__(self) -> str:
        digest = f"sha256 {self.sha256[:_SHOWN]}, " if self.sha256 else ""
        return f"{self.name} ({digest}{self.num_requests:,} requests)"

    def on(self, figures: object) -> object:
        """Return figures as JSON's values that tell the trace: a list's rows each, a mapping as a whole."""
        if isinstance(figures, Sequence) and not isinstance(figures, str):
            return [self.on(row) for row in figures]
        return {"trace": self, **_values(figures)}


def digest_of(path: Path) -> str:
    """Return the sha256 of a file, or of a directory's JSON files in order. Raises StorageError."""
    digest = hashlib.sha256()
    try:
        for file_path in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            with file_path.open("rb") as file:
                while part := file.read(1 << 20):
                    digest.update(part)
    except OSError as error:
        raise StorageError(f"can't read {path}: {error}") from error
    return digest.hexdigest()


def _values(figures: object) -> Mapping[str, Any]:
    if is_dataclass(figures) and not isinstance(figures, type):
        return {one.name: getattr(figures, one.name) for one in fields(figures)}
    assert isinstance(figures, Mapping)
    return figures
