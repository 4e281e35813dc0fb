"""Azure's CSV: arrival times and lengths only. It can size load, not reuse."""

from __future__ import annotations

import csv
from datetime import datetime
from typing import ClassVar

import numpy as np

from stemma.errors import TraceError
from stemma_lab.traces.request import LineFormat, TraceRequest, take_count

_COLUMNS = {"TIMESTAMP": "timestamp", "ContextTokens": "input", "GeneratedTokens": "output"}


class AzureFormat(LineFormat):
    """``TIMESTAMP,ContextTokens,GeneratedTokens`` with ISO timestamps."""

    name: ClassVar[str] = "azure"
    caveats: ClassVar[tuple[str, ...]] = (
        "lengths only: no content and no hashes, so no hit ratio, reuse distance or policy can be judged;"
        " only arrival times and token counts are known",
    )

    def __init__(self) -> None:
        self.block_size = 0
        self._columns: list[str] | None = None

    @staticmethod
    def recognises_header(line: bytes) -> bool:
        """Tell whether the first line is this format's header."""
        return line.upper().startswith(b"TIMESTAMP,")

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        """Read one line; the first is the header."""
        try:
            fields = next(csv.reader([line.decode("utf-8-sig").strip()]))
        except (UnicodeDecodeError, csv.Error, StopIteration) as error:
            raise TraceError(f"not a CSV line: {error}", line_number=number) from error
        if self._columns is None:
            missing = _COLUMNS.keys() - set(fields)
            if missing:
                raise TraceError(f"columns missing: {', '.join(sorted(missing))}", line_number=number)
            self._columns = [_COLUMNS.get(name, name) for name in fields]
            return None
        if len(fields) != len(self._columns):
            message = f"{len(fields)} fields, {len(self._columns)} columns"
            raise TraceError(message, line_number=number)
        record: dict[str, object] = dict(zip(self._columns, fields, strict=True))
        for name in ("input", "output"):
            text = str(record[name])
            record[name] = int(text) if text.isdigit() else text
        return TraceRequest(
            timestamp_s=_parse_time(str(record["timestamp"]), number),
            block_ids=np.empty(0, np.int64),
            input_tokens=take_count(record, "input", number),
            output_tokens=take_count(record, "output", number),
            num_prompt_blocks=0,
        )


def _parse_time(text: str, number: int) -> float:
    """Return seconds; accepts 7-digit fractions, which `fromisoformat` cuts to microseconds."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise TraceError(f"not an ISO time: {text!r}", line_number=number) from error
