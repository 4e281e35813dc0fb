"""Dynamo's agentic Mooncake JSONL: requests that wait for others, and how long tools took between them.

Version 1 has no header, and a line tells when it began, for whom it waited, and for how long then::

    {"request_id": "r2", "session_id": "a", "input_length": 70, "output_length": 5, "hash_ids": [0, 1],
     "timestamp": 300.0, "wait_for": ["r1"], "delay": 100.0, "tool_wait_ms": 80.0}

Version 2 begins with a header, and a line tells its earliest time and what it depends on::

    {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local", ...}
    {"request_id": "r2", "play_id": "p", "session_id": "a", "input_length": 70, "output_length": 5,
     "hash_ids": [0, 1], "not_before_ms": 0.0, "dependencies": [
        {"request_id": "r1", "trigger": "completion", "delay_ms": 180.0, "relation": "sequence"}]}

Numbers of blocks mean the same within a file of version 1, and within a play of version 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

from stemma.errors import TraceError
from stemma.prefix.eviction.policy import Ending
from stemma_lab.traces.aiperf import TOKENS_PER_S
from stemma_lab.traces.json_lines import parse_object
from stemma_lab.traces.mooncake import MOONCAKE_BLOCK_SIZE
from stemma_lab.traces.request import (
    LineFormat,
    TraceRequest,
    check_block_count,
    scoped_ids,
    take,
    take_count,
    take_number,
    take_numbers,
)

_SCHEMA = "dynamo.agentic_mooncake"
_MOST_MS = 1e12
Record = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Start:
    """When a request began, and what its client did since the answer before."""

    at_s: float
    gap_s: float | None = None
    """Since what it waited for had ended; None if it waited for nothing."""
    follows: Ending = Ending.UNKNOWN


class DynamoFormat(LineFormat):
    """Keeps begin and end of every request: later ones may wait for it."""

    name: ClassVar[str] = "dynamo"
    caveats: ClassVar[tuple[str, ...]] = (
        "generated tokens have no ids: they count as missed one turn later",
        f"where no time is told, answers are taken to come at {TOKENS_PER_S:.0f} tokens a second",
    )

    def __init__(self) -> None:
        self.block_size = MOONCAKE_BLOCK_SIZE
        self._is_size_known = False
        self._has_header = False
        self._spans: dict[str, tuple[float, float]] = {}
        """Begin and end of each request, seconds."""
        self._sessions: dict[str, int] = {}
        self._plays: dict[str, int] = {}

    @staticmethod
    def recognises(record: Record) -> bool:
        """Tell whether a first record looks like this format."""
        is_row = {"request_id", "input_length", "hash_ids"} <= record.keys()
        waits = not record.keys().isdisjoint({"wait_for", "tool_wait_ms", "prefix_reset"})
        return record.get("schema") == _SCHEMA or (is_row and waits)

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        """Read one line; a damaged one changes nothing."""
        record = parse_object(line, number)
        if "schema" in record:
            self._read_header(record, number)
            return None
        name = _text(record, "request_id", number)
        num_input = take_count(record, "input_length", number)
        num_output = take_count(record, "output_length", number)
        start = (self._start_of_2 if self._has_header else self._start_of_1)(record, number)
        ids = take_numbers(record, "hash_ids", number)
        self._learn_size(len(ids), num_input)
        check_block_count(len(ids), num_input, self.block_size, number)
        play = _text(record, "play_id", number) if self._has_header else ""
        ids = scoped_ids(ids, self._plays.setdefault(play, len(self._plays)), number)
        session = _text(record, "session_id", number) if record.get("session_id") is not None else name
        self._spans[name] = (start.at_s, start.at_s + num_output / TOKENS_PER_S)
        return TraceRequest(
            timestamp_s=start.at_s,
            block_ids=ids,
            input_tokens=num_input,
            output_tokens=num_output,
            num_prompt_blocks=len(ids),
            session=self._sessions.setdefault(session, len(self._sessions)),
            gap_s=start.gap_s,
            follows=start.follows,
        )

    def _read_header(self, record: Record, number: int) -> None:
        found = f"{record['schema']!r:.80} version {record.get('version')!r:.80}"
        if record["schema"] != _SCHEMA or record.get("version") != 2 or self._spans or self._has_header:
            raise TraceError(f"not {_SCHEMA} version 2, or not the first line: {found}", line_number=number)
        block_size = take_count(record, "block_size", number)
        if not block_size:
            raise TraceError("field 'block_size' is 0", line_number=number)
        self.block_size, self._is_size_known, self._has_header = block_size, True, True

    def _learn_size(self, num_ids: int, num_tokens: int) -> None:
        """Version 1 tells no block size: only one power of two gives a prompt two blocks or more."""
        if self._is_size_known or num_ids < 2:
            return
        size = 1 << max(0, -(-num_tokens // num_ids) - 1).bit_length()
        if -(-num_tokens // size) == num_ids:
            self.block_size, self._is_size_known = size, True

    def _start_of_1(self, record: Record, number: int) -> _Start:
        names = take(record, "wait_for", number) if "wait_for" in record else []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TraceError("field 'wait_for' isn't a list of texts", line_number=number)
        tools_s = _seconds(record, "tool_wait_ms", number)
        gap_s = _seconds(record, "delay", number) + tools_s
        ended_s = max((self._span(name, number)[1] for name in names), default=0.0)
        is_told = record.get("timestamp") is not None
        at_s = _seconds(record, "timestamp", number) if is_told else ended_s + gap_s
        follows = Ending.TOOL if tools_s > 0 else Ending.UNKNOWN
        return _Start(at_s, gap_s if names else None, follows)

    def _start_of_2(self, record: Record, number: int) -> _Start:
        at_s, gap_s = _seconds(record, "not_before_ms", number), None
        for one in _dependencies(record, number):
            is_end = one.get("trigger") != "dispatch"
            delay_s = _seconds(one, "delay_ms", number)
            at_s = max(at_s, self._span(_text(one, "request_id", number), number)[is_end] + delay_s)
            if one.get("relation") == "sequence":
                gap_s = delay_s
        return _Start(at_s, gap_s)

    def _span(self, name: str, number: int) -> tuple[float, float]:
        if name not in self._spans:
            raise TraceError(f"it waits for {name!r:.80}, which no line before has", line_number=number)
        return self._spans[name]


def _text(record: Record, key: str, number: int) -> str:
    value = take(record, key, number)
    if not isinstance(value, str):
        raise TraceError(f"field {key!r} isn't text: {value!r:.80}", line_number=number)
    return value


def _seconds(record: Record, key: str, number: int) -> float:
    """Return a field of milliseconds in seconds; 0 if it isn't there."""
    if record.get(key) is None:
        return 0.0
    value = take_number(record, key, number)
    if not 0.0 <= value <= _MOST_MS:
        raise TraceError(f"field {key!r} is outside 0 to {_MOST_MS:.0f} ms: {value}", line_number=number)
    return value / 1000.0


def _dependencies(record: Record, number: int) -> Iterator[Record]:
    entries = record.get("dependencies") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise TraceError("field 'dependencies' isn't a list of objects", line_number=number)
    return iter(cast(list[Record], entries))
