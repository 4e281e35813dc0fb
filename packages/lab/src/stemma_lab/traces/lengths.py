"""CSVs of arrival times and lengths only (Azure's, BurstGPT's). They can size load, not reuse."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Mapping
from datetime import datetime
from typing import ClassVar

import numpy as np

from stemma.errors import TraceError
from stemma_lab.traces.request import LineFormat, TraceRequest, take_count

_LENGTHS_ONLY = (
    "lengths only: no content and no hashes, so no hit ratio, reuse distance or policy can be judged;"
    " only arrival times and token counts are known"
)


class LengthsFormat(LineFormat):
    """A header, then a request a line."""

    caveats: ClassVar[tuple[str, ...]] = (_LENGTHS_ONLY,)
    columns: ClassVar[Mapping[str, str]]
    """Names in the header -> `timestamp`, `input`, `output`."""

    def __init__(self) -> None:
        self.block_size = 0
        self._columns: list[str] | None = None
        self._sessions: dict[str, int] = {}

    @classmethod
    def recognises_header(cls, line: bytes) -> bool:
        """Tell whether a first line has this format's columns."""
        names = line.decode("utf-8-sig", "replace").strip().split(",")
        return cls.columns.keys() <= set(names)

    @abstractmethod
    def _time(self, text: str, number: int) -> float:
        """Return seconds. Raises TraceError."""

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        """Read one line; the first is the header."""
        try:
            fields = next(csv.reader([line.decode("utf-8-sig").strip()]))
        except (UnicodeDecodeError, csv.Error, StopIteration) as error:
            raise TraceError(f"not a CSV line: {error}", line_number=number) from error
        if self._columns is None:
            missing = self.columns.keys() - set(fields)
            if missing:
                raise TraceError(f"columns missing: {', '.join(sorted(missing))}", line_number=number)
            self._columns = [self.columns.get(name, name) for name in fields]
            return None
        if len(fields) != len(self._columns):
            message = f"{len(fields)} fields, {len(self._columns)} columns"
            raise TraceError(message, line_number=number)
        return self._request(dict(zip(self._columns, fields, strict=True)), number)

    def _request(self, fields: Mapping[str, str], number: int) -> TraceRequest:
        counts = {name: int(text) if text.isdecimal() else text for name, text in fields.items()}
        session = fields.get("Session ID")
        return TraceRequest(
            timestamp_s=self._time(fields["timestamp"], number),
            block_ids=np.empty(0, np.int64),
            input_tokens=take_count(counts, "input", number),
            output_tokens=take_count(counts, "output", number),
            num_prompt_blocks=0,
            session=self._sessions.setdefault(session, len(self._sessions)) if session else None,
        )


class AzureFormat(LengthsFormat):
    """``TIMESTAMP,ContextTokens,GeneratedTokens`` with ISO timestamps."""

    name: ClassVar[str] = "azure"
    columns: ClassVar[Mapping[str, str]] = {
        "TIMESTAMP": "timestamp",
        "ContextTokens": "input",
        "GeneratedTokens": "output",
    }

    def _time(self, text: str, number: int) -> float:
        # 7-digit fractions are cut to microseconds.
        try:
            return datetime.fromisoformat(text).timestamp()
        except ValueError as error:
            raise TraceError(f"not an ISO time: {text!r:.80}", line_number=number) from error


class BurstFormat(LengthsFormat):
    """BurstGPT's: seconds, ``Request tokens``, ``Response tokens``; sessions since its second release."""

    name: ClassVar[str] = "burstgpt"
    caveats: ClassVar[tuple[str, ...]] = (_LENGTHS_ONLY, "a request that failed has an answer of 0 tokens")
    columns: ClassVar[Mapping[str, str]] = {
        "Timestamp": "timestamp",
        "Request tokens": "input",
        "Response tokens": "output",
    }

    def _time(self, text: str, number: int) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = float("nan")
        if not np.isfinite(seconds):
            raise TraceError(f"not a time in seconds: {text!r:.80}", line_number=number)
        return seconds
