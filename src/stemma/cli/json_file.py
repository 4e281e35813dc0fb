"""Results of commands as JSON files."""

from __future__ import annotations

from pathlib import Path

import orjson

from stemma.errors import StorageError


def write_json(path: Path, value: object) -> None:
    """Write what orjson can: dicts, lists, dataclasses. Raises StorageError."""
    data = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise StorageError(f"can't write {path}: {error}") from error
