"""One request of a trace, and the contract of a trace format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from stemma.errors import TraceError
from stemma.prefix.eviction.policy import Ending

RawIds: TypeAlias = npt.NDArray[np.int64]
"""Ids of chained prefix blocks as the trace names them, shape [num_blocks]."""


_MOST = 1 << 40
"""Largest count: sums and products of counts fit 64 bits."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: which prefix blocks it has, and how long it is."""

    timestamp_s: float
    """Arrival, seconds from any origin."""
    block_ids: RawIds
    """Chained ids from the root: equal ids mean equal whole prefixes. Empty if only lengths are known."""
    input_tokens: int
    output_tokens: int
    num_prompt_blocks: int
    """How many of `block_ids` the prompt has (a partial last one counts); the rest was generated."""
    session: int | None = None
    """Conversation, if the trace knows it."""
    turn: int | None = None
    """1 for the first request of a conversation, if the trace knows it."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the server found cached on its device, if the trace knows it."""
    ending: Ending = Ending.UNKNOWN
    """Who went on after the answer, if the trace knows it."""
    tools: tuple[str, ...] = ()
    """Hashes of the names of the tools that the answer calls, if the trace knows them."""
    held_s: tuple[float, float, float] | None = None
    """Seconds from arrival until it got its blocks, had its first token, and freed its blocks, if the trace
    knows them."""
    gap_s: float | None = None
    """Seconds from the end of its session's answer before until it came, tools' time among them, if the trace
    knows them."""
    follows: Ending = Ending.UNKNOWN
    """Who went on after its session's answer before, where the trace tells it only now."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The device cache of the server that recorded a trace."""

    eviction: str
    capacity_blocks: int
    """In blocks of the trace."""
    server_block: int = 1
    """Blocks of the trace that one block of the server holds."""


_ENDINGS = {
    "tool_use": Ending.TOOL,
    "tool_calls": Ending.TOOL,
    "function_call": Ending.TOOL,
    "end_turn": Ending.TURN,
    "stop": Ending.TURN,
    "stop_sequence": Ending.TURN,
}


def ending_of(finish_reason: object) -> Ending:
    """Return who goes on after an answer, from the finish reason as APIs name it."""
    return _ENDINGS.get(finish_reason, Ending.UNKNOWN) if isinstance(finish_reason, str) else Ending.UNKNOWN


class TraceFormat(ABC):
    """Parses the lines of one format. An instance reads one file: a header line may set `block_size`."""

    name: ClassVar[str]
    caveats: ClassVar[tuple[str, ...]] = ()
    """Facts that this format can't tell; shown with every result."""

    block_size: int
    """Tokens that one block id stands for; 0 if there are no ids."""
    measured: Measured | None = None
    """The cache whose hits the requests tell, if they do."""

    has_documents: ClassVar[bool] = False
    """Whether a file that isn't JSONL is one record."""

    @abstractmethod
    def parse_all(self, line: bytes, number: int) -> Iterable[TraceRequest]:
        """Return the requests of this record. Raises TraceError."""


class LineFormat(TraceFormat):
    """A format with one request a line."""

    def parse_all(self, line: bytes, number: int) -> Iterable[TraceRequest]:
        """Return the request of this line, if it is no header. Raises TraceError."""
        request = self.parse(line, number)
        return () if request is None else (request,)

    @abstractmethod
    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        """Return the request of this line, None for a header. Raises TraceError."""


def take(record: Mapping[str, object], key: str, number: int) -> object:
    """Return a field or raise TraceError."""
    if key not in record:
        raise TraceError(f"field {key!r} is missing", line_number=number)
    return record[key]


def take_number(record: Mapping[str, object], key: str, number: int) -> float:
    """Return a finite number or raise TraceError."""
    value = take(record, key, number)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        raise TraceError(f"field {key!r} isn't a number: {value!r}", line_number=number)
    return float(value)


def take_count(record: Mapping[str, object], key: str, number: int) -> int:
    """Return a count of 0 to 2^40 or raise TraceError."""
    value = take(record, key, number)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise TraceError(f"field {key!r} isn't a count: {value!r}", line_number=number)
    return value


def take_numbers(record: Mapping[str, object], key: str, number: int) -> RawIds:
    """Return a list of 64-bit integers or raise TraceError."""
    value = take(record, key, number)
    if not isinstance(value, list):
        raise TraceError(f"field {key!r} isn't a list", line_number=number)
    try:
        ids = np.asarray(value, dtype=np.int64) if value else np.empty(0, np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"field {key!r} isn't a list of integers", line_number=number) from error
    if ids.ndim != 1 or not all(type(item) is int for item in value):
        raise TraceError(f"field {key!r} isn't a list of integers", line_number=number)
    return ids


def take_ids(record: Mapping[str, object], key: str, number: int) -> RawIds:
    """Return a list of distinct 64-bit ids or raise TraceError."""
    ids = take_numbers(record, key, number)
    if len(np.unique(ids)) != len(ids):
        raise TraceError(f"field {key!r} repeats an id: these aren't chained prefix ids", line_number=number)
    return ids


def scoped_ids(ids: RawIds, scope: int, number: int) -> RawIds:
    """Return ids that no other scope has; raise TraceError unless all are 0 to 2^40 - 1."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < _MOST:
        raise TraceError(f"field 'hash_ids' has numbers outside 0..{_MOST - 1}", line_number=number)
    return ids + scope * _MOST


def check_block_count(num_ids: int, input_tokens: int, block_size: int, number: int) -> None:
    """Raise TraceError unless `num_ids` blocks can hold `input_tokens` (one block of slack either way)."""
    expected = -(-input_tokens // block_size)
    if abs(num_ids - expected) > 1:
        raise TraceError(
            f"{num_ids} block ids, but {input_tokens} tokens need {expected} of {block_size}",
            line_number=number,
        )
