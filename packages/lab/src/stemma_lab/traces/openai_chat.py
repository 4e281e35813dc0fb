"""OpenAI chat requests as JSONL, turned into blocks by a tokenizer and its chat template.

A line is a request body (``{"messages": [...]}``) or a line of the batch format (``{"body": {...}}``). Fields
beside the body that help if they are there: ``timestamp`` (seconds; default: one second per line),
``output_length`` or ``max_tokens``, ``user``. Prompts are hashed here and dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from stemma.errors import InvalidRequest, TraceError
from stemma.types import TokenArray
from stemma_lab.traces.json_lines import parse_object
from stemma_lab.traces.request import LineFormat, RawIds, TraceRequest, take, take_number


class ChatTokenizer(Protocol):
    """The part of a tokenizer that the reader needs."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> TokenArray:
        """Return the token ids of a conversation, the generation prompt included."""


class OpenAIChatFormat(LineFormat):
    """Needs a tokenizer: block boundaries fall on tokens."""

    name: ClassVar[str] = "openai"
    caveats: ClassVar[tuple[str, ...]] = (
        "arrival times are one second per line unless a line has `timestamp`",
    )

    def __init__(self, tokenizer: ChatTokenizer, block_size: int = 16) -> None:
        self.block_size = block_size
        self._tokenizer = tokenizer

    @staticmethod
    def recognises(record: Mapping[str, object]) -> bool:
        """Tell whether a first record looks like this format."""
        return "messages" in record or isinstance(record.get("body"), dict)

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        """Read one line."""
        record = parse_object(line, number)
        body = record.get("body", record)
        if not isinstance(body, dict):
            raise TraceError("field 'body' isn't an object", line_number=number)
        tokens = tokens_of(
            self._tokenizer, take(body, "messages", number), _tools(body), ("messages", number)
        )
        ids = chain_ids(tokens, self.block_size)
        user = record.get("user", body.get("user"))
        return TraceRequest(
            timestamp_s=take_number(record, "timestamp", number) if "timestamp" in record else float(number),
            block_ids=ids,
            input_tokens=len(tokens),
            output_tokens=_output_tokens(record, body),
            num_prompt_blocks=len(ids),
            session=None if user is None else _hash64(str(user).encode()),
        )


def tokens_of(
    tokenizer: ChatTokenizer,
    messages: object,
    tools: Sequence[Mapping[str, Any]] | None,
    place: tuple[str, int],
) -> TokenArray:
    """Return a conversation's tokens; `place`: field and line of its messages. Raises TraceError."""
    name, number = place
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise TraceError(f"field {name!r} isn't a list of objects", line_number=number)
    try:
        return tokenizer.apply_chat_template(messages, tools=tools)
    except (InvalidRequest, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"the tokenizer rejects the messages: {error}", line_number=number) from error


def chain_ids(tokens: TokenArray, block_size: int) -> RawIds:
    """Return one 63-bit id per block of `tokens` (the last may be partial), chained over all before it."""
    state = b""
    ids = []
    for start in range(0, len(tokens), block_size):
        block = tokens[start : start + block_size].astype("<i4").tobytes()
        state = hashlib.blake2b(state + block, digest_size=16).digest()
        ids.append(int.from_bytes(state[:8], "little") >> 1)
    return np.asarray(ids, dtype=np.int64)


def _hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _output_tokens(record: Mapping[str, object], body: Mapping[str, object]) -> int:
    for source, key in ((record, "output_length"), (body, "max_completion_tokens"), (body, "max_tokens")):
        value = source.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return 0


def _tools(body: Mapping[str, object]) -> list[Mapping[str, Any]] | None:
    tools = body.get("tools")
    return tools if isinstance(tools, list) and tools else None
