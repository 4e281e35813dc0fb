"""aiperf's JSONL of conversations (``mooncake_trace`` with sessions): one turn a line.

A line tells what is new since the turn before, with blocks of 512 tokens::

    {"session_id": "a", "input_length": 1536, "output_length": 320, "hash_ids": [0, 1, 2], "timestamp": 0}
    {"session_id": "a", "input_length": 768, "output_length": 180, "hash_ids": [9, 10], "delay": 2450.3}

`timestamp` and `delay` are milliseconds; a delay counts from the end of the answer before. A prompt is all
turns so far with their answers. A line that repeats the session's blocks so far, or says so
(``"context_mode": "message_array_with_responses"``), is a whole prompt. Without `hash_ids` the text is
random, so nobody else has its blocks. Lines with text need a tokenizer, and aren't read here.

The traces that aiperf's repository publishes are under the Apache licence 2.0; none is in this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from stemma.errors import TraceError
from stemma_lab.traces.json_lines import parse_object
from stemma_lab.traces.mooncake import MOONCAKE_BLOCK_SIZE
from stemma_lab.traces.request import (
    LineFormat,
    RawIds,
    TraceRequest,
    check_block_count,
    take_count,
    take_number,
    take_numbers,
)

TOKENS_PER_S = 50.0
"""Speed at which answers are taken to come: a delay counts from their end."""
BEGINNINGS_EVERY_S = 60.0
"""Seconds between the beginnings of sessions that don't say when they begin."""
_WHOLE, _NEW = "message_array_with_responses", "deltas_without_responses"
_MOST_BLOCKS = 1 << 13
"""Of one prompt: 4 M tokens."""
MOST_IN_ALL = 1 << 28
"""Blocks of all prompts together (2 GiB): a short line may stand for a long conversation."""
_MOST_ID = 1 << 40
_MOST_MS = 1e12
Record = Mapping[str, object]


@dataclass(slots=True)
class _Session:
    number: int
    ends_s: float
    """When its latest answer ended."""
    ids: RawIds = field(default_factory=lambda: np.empty(0, np.int64))
    """Blocks of its latest prompt."""
    num_tokens: int = 0
    """Of that prompt with its answer."""
    turn: int = 0


class AiperfFormat(LineFormat):
    """Keeps the latest prompt of every session. Answers, and prompts without ids, get numbers below 0."""

    name: ClassVar[str] = "aiperf"
    caveats: ClassVar[tuple[str, ...]] = (
        "generated tokens have no ids: they count as missed one turn later",
        f"delays count from an answer's end; answers are taken to come at {TOKENS_PER_S:.0f} tokens a second",
    )

    def __init__(self) -> None:
        self.block_size = MOONCAKE_BLOCK_SIZE
        self._sessions: dict[str, _Session] = {}
        self._num_sessions = 0
        self._num_made_up = 0
        self._num_in_all = 0

    @staticmethod
    def recognises(record: Record) -> bool:
        """Tell whether a first record looks like this format, which Mooncake's own release isn't."""
        if "input_length" not in record or "chat_id" in record:
            return False
        return "session_id" in record or not {"timestamp", "hash_ids"} <= record.keys()

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        """Read one line; a damaged one changes nothing of its session."""
        record = parse_object(line, number)
        if "input_length" not in record and not {"text_input", "messages", "payload"}.isdisjoint(record):
            raise TraceError(
                "it has text instead of 'input_length': only a tokenizer can tell its blocks (lines with "
                "'messages' are read as --format openai)",
                line_number=number,
            )
        name = _name(record, number)
        session = self._session(name)
        begins_s = _begins_s(record, session, number)
        num_new = take_count(record, "input_length", number)
        num_output = take_count(record, "output_length", number) if _has(record, "output_length") else 0
        given = take_numbers(record, "hash_ids", number) if _has(record, "hash_ids") else None
        if given is not None:
            _check_ids(given, num_new, number)
        if _is_whole(record, session, given, number):
            ids, num_tokens = self._new_ids(given, num_new, number), num_new
        else:
            num_tokens = session.num_tokens + num_new
            ids = self._grown(session.ids, self._new_ids(given, num_new, number), num_tokens, number)
        self._num_in_all += len(ids)
        if self._num_in_all > MOST_IN_ALL:
            raise TraceError(f"the prompts have more than {MOST_IN_ALL} blocks in all", line_number=number)
        session.ids, session.num_tokens = ids, num_tokens + num_output
        session.turn += 1
        session.ends_s = begins_s + num_output / TOKENS_PER_S
        if name is not None and session.turn == 1:
            self._sessions[name] = session
        self._num_sessions = max(self._num_sessions, session.number + 1)
        return TraceRequest(
            timestamp_s=begins_s,
            block_ids=ids,
            input_tokens=num_tokens,
            output_tokens=num_output,
            num_prompt_blocks=len(ids),
            session=session.number,
            turn=session.turn,
        )

    def _session(self, name: str | None) -> _Session:
        """Return the session of that name, or one that hasn't begun yet."""
        known = None if name is None else self._sessions.get(name)
        return known or _Session(self._num_sessions, self._num_sessions * BEGINNINGS_EVERY_S)

    def _new_ids(self, given: RawIds | None, num_tokens: int, number: int) -> RawIds:
        if given is None:
            return self._made_up(-(-num_tokens // self.block_size), number)
        return given

    def _grown(self, before: RawIds, new: RawIds, num_tokens: int, number: int) -> RawIds:
        """Return the blocks of a prompt of `num_tokens`: those before, the answer's, the new ones."""
        num_answer = -(-num_tokens // self.block_size) - len(before) - len(new)
        answer = self._made_up(max(0, num_answer), number)
        ids = np.concatenate((before, answer, new))
        _check_length(len(ids), number)
        return ids

    def _made_up(self, num_blocks: int, number: int) -> RawIds:
        _check_length(num_blocks, number)
        begin = self._num_made_up
        self._num_made_up += num_blocks
        return -1 - np.arange(begin, begin + num_blocks, dtype=np.int64)


def _has(record: Record, key: str) -> bool:
    return record.get(key) is not None


def _name(record: Record, number: int) -> str | None:
    name = record.get("session_id")
    if name is not None and not isinstance(name, str):
        raise TraceError(f"field 'session_id' isn't text: {name!r:.80}", line_number=number)
    return name


def _begins_s(record: Record, session: _Session, number: int) -> float:
    """Return when a turn begins: as it says, or after its delay; a session that doesn't say, in its turn."""
    key = next((key for key in ("timestamp", "delay") if _has(record, key)), None)
    if key is None:
        return session.ends_s
    value = take_number(record, key, number)
    if not 0.0 <= value <= _MOST_MS:
        raise TraceError(f"field {key!r} is outside 0 to {_MOST_MS:.0f} ms: {value}", line_number=number)
    return value / 1000.0 + (session.ends_s if key == "delay" else 0.0)


def _check_ids(ids: RawIds, num_tokens: int, number: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < _MOST_ID:
        raise TraceError(f"field 'hash_ids' has numbers outside 0..{_MOST_ID - 1}", line_number=number)
    _check_length(len(ids), number)
    check_block_count(len(ids), num_tokens, MOONCAKE_BLOCK_SIZE, number)


def _check_length(num_blocks: int, number: int) -> None:
    if num_blocks > _MOST_BLOCKS:
        raise TraceError(f"a prompt of {num_blocks} blocks; {_MOST_BLOCKS} are the most", line_number=number)


def _is_whole(record: Record, session: _Session, given: RawIds | None, number: int) -> bool:
    """Whether a line holds the whole prompt: it is a first turn, says so, or repeats the turn before."""
    mode = record.get("context_mode")
    if mode not in (None, _WHOLE, _NEW):
        raise TraceError(f"field 'context_mode' is {mode!r:.80}: not known", line_number=number)
    if mode is not None or not session.turn:
        return mode == _WHOLE or not session.turn
    before = session.ids[:-1]  # the last block was partial, so it may have another id now
    if given is None or not len(before):
        return False
    return len(given) > len(before) and np.array_equal(given[: len(before)], before)
