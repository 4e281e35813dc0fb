"""Qwen-Bailian's anonymised JSONL: 16-token blocks, and who continues which chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from stemma_lab.traces.json_lines import parse_object
from stemma_lab.traces.request import (
    LineFormat,
    TraceRequest,
    check_block_count,
    take_count,
    take_ids,
    take_number,
)

BAILIAN_BLOCK_SIZE = 16


class BailianFormat(LineFormat):
    """Timestamps are seconds. ``parent_chat_id`` (-1: none) chains the requests of one conversation."""

    name: ClassVar[str] = "bailian"
    caveats: ClassVar[tuple[str, ...]] = (
        "generated tokens have no ids: they count as missed one turn later",
    )

    def __init__(self) -> None:
        self.block_size = BAILIAN_BLOCK_SIZE
        self._session_of_chat: dict[int, int] = {}

    @staticmethod
    def recognises(record: Mapping[str, object]) -> bool:
        """Tell whether a first record looks like this format."""
        return {"timestamp", "input_length", "hash_ids", "chat_id"} <= record.keys()

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        """Read one line."""
        record = parse_object(line, number)
        ids = take_ids(record, "hash_ids", number)
        input_tokens = take_count(record, "input_length", number)
        check_block_count(len(ids), input_tokens, self.block_size, number)
        chat = int(take_number(record, "chat_id", number))
        parent = int(take_number(record, "parent_chat_id", number)) if "parent_chat_id" in record else -1
        turn = take_count(record, "turn", number) if "turn" in record else None
        session = self._session_of_chat.get(parent, parent if parent >= 0 else chat)
        self._session_of_chat[chat] = session
        return TraceRequest(
            timestamp_s=take_number(record, "timestamp", number),
            block_ids=ids,
            input_tokens=input_tokens,
            output_tokens=take_count(record, "output_length", number),
            num_prompt_blocks=len(ids),
            session=session,
            turn=turn,
        )
