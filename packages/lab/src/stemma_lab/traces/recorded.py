"""Stemma's own traces, written by `stemma serve --record-trace` (`engine/trace_log.py` has the schema)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from stemma.engine.trace_log import TRACE_FORMAT, TRACE_VERSION
from stemma.errors import TraceError
from stemma.prefix.eviction.policy import Ending
from stemma.types import Tier
from stemma_lab.traces.json_lines import parse_object
from stemma_lab.traces.request import LineFormat, Measured, TraceRequest, take, take_count, take_number

_ENDINGS = {ending.name.lower(): ending for ending in Ending}


class RecordedFormat(LineFormat):
    """A header line, then one line per finished request: salted chained hashes, lengths, no text."""

    name: ClassVar[str] = "stemma"

    def __init__(self) -> None:
        self.block_size = 0
        self.measured: Measured | None = None
        self._epoch_s: float | None = None
        """Of the last header; None: version 1, whose clocks can't be compared."""
        self._sessions: dict[tuple[float | None, object], int] = {}

    @staticmethod
    def recognises(record: Mapping[str, object]) -> bool:
        """Tell whether a first record looks like this format."""
        return record.get("format") == TRACE_FORMAT

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        """Read one line. A server that was restarted appends another header; its salt differs."""
        record = parse_object(line, number)
        if "format" in record:
            self._read_header(record, number)
            return None
        if self.block_size == 0:
            raise TraceError("a request stands before the header line", line_number=number)
        input_tokens = take_count(record, "input_tokens", number)
        text = take(record, "blocks", number)
        try:
            ids = np.frombuffer(base64.b64decode(str(text), validate=True), dtype="<i8").astype(np.int64)
        except (ValueError, binascii.Error) as error:
            raise TraceError(
                f"field 'blocks' isn't base64 of 64-bit hashes: {error}", line_number=number
            ) from error
        num_prompt_blocks = -(-input_tokens // self.block_size)
        if len(ids) < num_prompt_blocks:
            message = f"{len(ids)} block hashes, but the prompt alone has {num_prompt_blocks} blocks"
            raise TraceError(message, line_number=number)
        return TraceRequest(
            timestamp_s=take_number(record, "timestamp_s", number) + (self._epoch_s or 0.0),
            block_ids=ids,
            input_tokens=input_tokens,
            output_tokens=take_count(record, "output_tokens", number),
            num_prompt_blocks=num_prompt_blocks,
            session=self._session(record),
            turn=_turn(record),
            num_cached_tokens=_num_on_device(record, number),
            ending=_ENDINGS.get(str(record.get("ending")), Ending.UNKNOWN),
            tools=_tools(record, number),
            held_s=_held_s(record, number),
        )

    def _session(self, record: Mapping[str, object]) -> int | None:
        name = record.get("session")
        if not name:
            return None
        return self._sessions.setdefault((self._epoch_s, str(name)), len(self._sessions))

    def _read_header(self, record: Mapping[str, object], number: int) -> None:
        version = record.get("version")
        if record.get("format") != TRACE_FORMAT or version not in (1, TRACE_VERSION):
            found = f"{record.get('format')!r} version {version!r}"
            message = f"not {TRACE_FORMAT} version 1 or {TRACE_VERSION}: {found}"
            raise TraceError(message, line_number=number)
        if self.block_size and (version == 1) != (self._epoch_s is None):
            message = "recordings of versions 1 and 2 in one file: their times can't be compared; split it"
            raise TraceError(message, line_number=number)
        if version == TRACE_VERSION:
            self._epoch_s = take_number(record, "epoch_s", number)
            capacity = take_count(record, "capacity_blocks", number)
            server_block_size = take_count(record, "server_block_size", number)
            server_block = max(1, server_block_size // max(1, take_count(record, "block_size", number)))
            self.measured = Measured(str(record.get("eviction", "")), capacity, server_block)
        block_size = take_count(record, "block_size", number)
        if block_size < 1 or (self.block_size and block_size != self.block_size):
            raise TraceError(f"block size {block_size} after {self.block_size}", line_number=number)
        self.block_size = block_size


def _turn(record: Mapping[str, object]) -> int | None:
    """Return one more than the answers in the prompt, if it has messages."""
    roles = record.get("roles")
    return 1 + roles.count("a") if isinstance(roles, str) and roles else None


def _num_on_device(record: Mapping[str, object], number: int) -> int | None:
    """Return the tokens found cached on the device, or in any tier where that is all the line tells."""
    by_tier = record.get("cached_by_tier")
    if isinstance(by_tier, dict):
        return take_count(by_tier, Tier.DEVICE.value, number) if Tier.DEVICE in by_tier else 0
    return take_count(record, "num_cached_tokens", number) if "num_cached_tokens" in record else None


def _tools(record: Mapping[str, object], number: int) -> tuple[str, ...]:
    tools = record.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(name, str) for name in tools):
        raise TraceError(f"field 'tools' isn't a list of texts: {tools!r}", line_number=number)
    return tuple(tools)


def _held_s(record: Mapping[str, object], number: int) -> tuple[float, float, float] | None:
    if "service_s" not in record:
        return None
    begin, end = take_number(record, "queue_wait_s", number), take_number(record, "service_s", number)
    has_token = record.get("first_token_s") is not None
    first = take_number(record, "first_token_s", number) if has_token else begin
    if not 0.0 <= begin <= first <= end:
        message = f"times out of order: blocks after {begin:g} s, a token after {first:g}, done after {end:g}"
        raise TraceError(message, line_number=number)
    return begin, first, end
