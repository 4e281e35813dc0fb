"""Receipts out of files: whole answers, lines of batches, logs; wherever an envelope stands in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stemma.errors import InvalidRequest, StorageError
from stemma.server.schemas.json_input import parse_json
from stemma_receipts.errors import ReceiptError

MAX_LINE_BYTES = 64 << 20
_MAX_VALUES = 16_000_000
"""Token ids are values."""


@dataclass(frozen=True, slots=True)
class SignedReceipt:
    """A receipt as it stands in a file."""

    line: int
    envelope: dict[str, Any]
    opening: Any = None
    """What stands beside it."""


def read_receipts(path: Path) -> Iterator[SignedReceipt]:
    """Yield the receipts of a JSON or JSONL file. Raises ReceiptError with the line, StorageError."""
    try:
        with path.open("rb") as file:
            first = file.readline(MAX_LINE_BYTES + 1)
            if first.strip() in (b"{", b"["):  # one document over several lines
                yield from _found(1, first + file.read(MAX_LINE_BYTES + 1))
                return
            line, number = first, 1
            while line:
                if line.strip():
                    yield from _found(number, line)
                line, number = file.readline(MAX_LINE_BYTES + 1), number + 1
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror or error}") from error


def _found(number: int, content: bytes) -> Iterator[SignedReceipt]:
    if len(content) > MAX_LINE_BYTES:
        raise ReceiptError(f"line {number}: more than {MAX_LINE_BYTES >> 20} MiB")
    try:
        value = parse_json(content.strip(), "the line", max_values=_MAX_VALUES)
    except InvalidRequest as error:
        raise ReceiptError(f"line {number}: {error}") from error
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict) and isinstance(one.get("envelope"), dict):
            yield SignedReceipt(number, one["envelope"], one.get("opening"))
        elif isinstance(one, dict):
            pending.extend(reversed(one.values()))
        elif isinstance(one, list):
            pending.extend(item for item in reversed(one) if isinstance(item, dict | list))
