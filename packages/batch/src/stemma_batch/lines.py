"""Lines of a batch's file: what one must be, and the key by which requests are ordered depth first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from stemma.engine.depth_first import token_key
from stemma.errors import InvalidRequest, StemmaError
from stemma.server.schemas.json_input import parse_json
from stemma.types import as_tokens

MAX_LINES = 1_000_000
MAX_CUSTOM_ID_CHARS = 512
_MAX_KEY_BYTES = 256 * 1024
"""Prompts that begin with as many equal bytes are neighbours enough."""
_PROMPT_FIELDS = ("tools", "instructions", "messages", "prompt", "input")
"""In the order in which templates write them."""


class BadLine(StemmaError):
    """A line that is no request. `code` and `param` are OpenAI's words for it."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class LineLimits:
    """What a line may be: the bounds of a request's body."""

    max_bytes: int
    max_values: int
    """Of its JSON."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request's place in the file, and what is known of it before it runs."""

    number: int
    """From 0, blank lines left out."""
    custom_id: str
    offset: int
    num_bytes: int
    key: bytes


def read_lines(path: Path, endpoint: str, limits: LineLimits) -> Iterator[BatchLine | BadLine]:
    """Yield each request of a file, or why a line is none. Raises OSError."""
    number = offset = 0
    max_bytes = limits.max_bytes
    with path.open("rb") as file:
        while raw := file.readline(max_bytes + 1):
            if raw.strip():
                try:
                    if len(raw) > max_bytes:
                        raise BadLine(f"a line has more than {max_bytes} bytes", "request_too_large")
                    if number >= MAX_LINES:
                        raise BadLine(f"more than {MAX_LINES} requests", "too_many_tasks")
                    custom_id, key = _checked(raw, endpoint, limits)
                    yield BatchLine(number, custom_id, offset, len(raw), key)
                except BadLine as error:
                    yield error
                    if len(raw) > max_bytes or number >= MAX_LINES:
                        return
                number += 1
            offset += len(raw)


def body_of(raw: bytes, limits: LineLimits) -> bytes:
    """Return the body of the request in a line that was checked. Raises BadLine if the file has changed."""
    body = _parsed(raw, limits).get("body")
    return orjson.dumps(body)


def _parsed(raw: bytes, limits: LineLimits) -> Mapping[str, Any]:
    """Return a line's object, bounded as bodies are: a batch is no second entrance."""
    try:
        line = parse_json(raw, "the line", max_values=limits.max_values)
    except InvalidRequest as error:
        raise BadLine(str(error), "invalid_json_line") from error
    if not isinstance(line, dict):
        raise BadLine("the line is no JSON object", "invalid_json_line")
    return line


def _checked(raw: bytes, endpoint: str, limits: LineLimits) -> tuple[str, bytes]:
    """Return a line's own id and its key."""
    line = _parsed(raw, limits)
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise BadLine(
            f"custom_id must be text of 1 to {MAX_CUSTOM_ID_CHARS} characters",
            "missing_required_parameter",
            "custom_id",
        )
    if line.get("method", "POST") != "POST":
        raise BadLine("method must be POST", "invalid_method", "method")
    if line.get("url") != endpoint:
        raise BadLine(f"url must be the batch's endpoint, {endpoint}", "mismatched_endpoint", "url")
    if not isinstance(body, dict):
        raise BadLine("body must be an object", "missing_required_parameter", "body")
    if body.get("stream"):
        raise BadLine("a batch doesn't stream; leave stream out", "invalid_request", "stream")
    return custom_id, prompt_key(body)


def prompt_key(body: dict[str, Any]) -> bytes:
    """Return bytes that begin alike for requests whose prompts do."""
    head = orjson.dumps([body.get("model"), body.get("cache_salt")])
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(_is_token(one) for one in prompt):
        return (head + token_key(as_tokens(prompt)))[:_MAX_KEY_BYTES]
    parts = [body[name] for name in _PROMPT_FIELDS if body.get(name) is not None]
    texts = [one.encode("utf-8", "replace") if isinstance(one, str) else _packed(one) for one in parts]
    return (head + b"".join(texts))[:_MAX_KEY_BYTES]


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _packed(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
