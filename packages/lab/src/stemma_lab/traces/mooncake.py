"""Mooncake's JSONL (FAST'25 release): ``timestamp`` in ms, lengths, ``hash_ids`` of 512-token blocks.

Traces of agents in this form also tell ``session`` and ``finish_reason``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from stemma_lab.traces.json_lines import parse_object
from stemma_lab.traces.request import (
    LineFormat,
    TraceRequest,
    check_block_count,
    ending_of,
    take_count,
    take_ids,
    take_number,
)

MOONCAKE_BLOCK_SIZE = 512


class MooncakeFormat(LineFormat):
    """The last block of a prompt is partial and has an id of its own."""

    name: ClassVar[str] = "mooncake"
    caveats: ClassVar[tuple[str, ...]] = (
        "generated tokens have no ids: they count as missed one turn later",
    )

    def __init__(self) -> None:
        self.block_size = MOONCAKE_BLOCK_SIZE

    @staticmethod
    def recognises(record: Mapping[str, object]) -> bool:
        """Tell whether a first record looks like this format."""
        return {"timestamp", "input_length", "hash_ids"} <= record.keys() and "chat_id" not in record

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        """Read one line."""
        record = parse_object(line, number)
        ids = take_ids(record, "hash_ids", number)
        input_tokens = take_count(record, "input_length", number)
        check_block_count(len(ids), input_tokens, self.block_size, number)
        return TraceRequest(
            timestamp_s=take_number(record, "timestamp", number) / 1000.0,
            block_ids=ids,
            input_tokens=input_tokens,
            output_tokens=take_count(record, "output_length", number),
            num_prompt_blocks=len(ids),
            session=take_count(record, "session", number) if "session" in record else None,
            ending=ending_of(record.get("finish_reason")),
        )
