"""Weka's traces of coding agents (kv-cache-tester), which aiperf replays too: a JSON object a conversation.

A conversation is a file of its own, or a line of JSONL as the copies on the Hugging Face hub have it::

    {"id": "f6...", "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "type": "s", "in": 25259, "out": 86, "hash_ids": [1, 2], "stop": "tool_use"},
        {"t": 9.5, "type": "subagent", "agent_id": "a1", "requests": [...]}]}

`t` is in seconds from the conversation's beginning; that of a subagent's requests may count from the
subagent's. Numbers of blocks mean the same within a conversation, or everywhere if the scope is "global". The
traces that the project publishes are under the Apache licence 2.0; none of them is in this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, cast

from stemma.errors import TraceError
from stemma_lab.traces.json_lines import parse_object
from stemma_lab.traces.request import (
    TraceFormat,
    TraceRequest,
    ending_of,
    scoped_ids,
    take,
    take_count,
    take_number,
    take_numbers,
)

BEGINNINGS_EVERY_S = 60.0
"""Seconds from one conversation's beginning to the next one's."""
_DEEPEST = 8
"""Subagents within subagents."""
Record = Mapping[str, object]


class WekaFormat(TraceFormat):
    """Conversations have no common clock, so one begins every minute, in the order of the file."""

    name: ClassVar[str] = "weka"
    caveats: ClassVar[tuple[str, ...]] = (
        f"conversations have no common clock: one begins every {BEGINNINGS_EVERY_S:.0f} s",
        "generated tokens have no ids: they count as missed one turn later",
    )
    has_documents: ClassVar[bool] = True

    def __init__(self) -> None:
        self.block_size = 0
        self._num_conversations = 0
        self._num_sessions = 0

    @staticmethod
    def recognises(record: Record) -> bool:
        """Tell whether a first record looks like this format."""
        return {"requests", "block_size"} <= record.keys()

    def parse_all(self, line: bytes, number: int) -> Iterator[TraceRequest]:
        """Yield the requests of one conversation, those of subagents behind the parent's."""
        record = parse_object(line, number)
        block_size = take_count(record, "block_size", number)
        if block_size < 1 or (self.block_size and block_size != self.block_size):
            raise TraceError(f"block size {block_size} after {self.block_size}", line_number=number)
        self.block_size = block_size
        begins_s = self._num_conversations * BEGINNINGS_EVERY_S
        self._num_conversations += 1
        is_global = record.get("hash_id_scope") == "global"
        scope = 0 if is_global else self._num_conversations
        # A damaged conversation gives none of its requests.
        yield from list(self._requests(record, begins_s, scope, number, 0))

    def _requests(
        self, record: Record, begins_s: float, scope: int, number: int, depth: int
    ) -> Iterator[TraceRequest]:
        entries = take(record, "requests", number)
        if not isinstance(entries, list) or depth > _DEEPEST:
            raise TraceError(f"'requests' isn't a list, or lies deeper than {_DEEPEST}", line_number=number)
        session = self._num_sessions
        self._num_sessions += 1
        turn = 0
        for entry in entries:
            if not isinstance(entry, dict):
                raise TraceError("a request isn't an object", line_number=number)
            if entry.get("type") == "subagent":
                begins = begins_s + _offset_of(cast(Record, entry), number)
                yield from self._requests(cast(Record, entry), begins, scope, number, depth + 1)
                continue
            turn += 1
            yield self._request(cast(Record, entry), begins_s, scope, number, (session, turn))

    def _request(
        self, entry: Record, begins_s: float, scope: int, number: int, place: tuple[int, int]
    ) -> TraceRequest:
        ids = scoped_ids(take_numbers(entry, "hash_ids", number), scope, number)
        return TraceRequest(
            timestamp_s=begins_s + take_number(entry, "t", number),
            block_ids=ids,
            input_tokens=take_count(entry, "in", number),
            output_tokens=take_count(entry, "out", number),
            num_prompt_blocks=len(ids),
            session=place[0],
            turn=place[1],
            ending=ending_of(entry.get("stop")),
        )


def _offset_of(subagent: Record, number: int) -> float:
    """Return what is added to the times of a subagent's requests: 0 if they count from the beginning."""
    begins = take_number(subagent, "t", number)
    inner = subagent.get("requests")
    first = inner[0] if isinstance(inner, list) and inner and isinstance(inner[0], dict) else {}
    earliest = first.get("t")
    return begins if isinstance(earliest, int | float) and earliest < begins else 0.0
