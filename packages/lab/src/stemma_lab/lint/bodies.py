"""From files of request bodies to chat requests and texts: OpenAI's, Anthropic's, the Responses API's.

A file is JSONL, a body a line; or one JSON document: a list of bodies, one body, or a recording of an agent
(`recordings`). A body may stand in a wrapper that names its path: a line of a batch (``body``, ``params``), a
recorded request (``path``, ``body``). Each line is hostile until it is read: bytes, depth and values are
bounded before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stemma.errors import InvalidRequest, StorageError, TraceError
from stemma.server.apis.messages.blocks import chat_fields as fields_of_messages
from stemma.server.apis.responses.items import chat_fields as fields_of_response
from stemma.server.apis.responses.items import chat_messages
from stemma.server.schemas.json_input import parse_json
from stemma.server.schemas.messages import MessagesRequest
from stemma.server.schemas.openai import ChatRequest
from stemma.server.schemas.responses import ResponsesRequest
from stemma.server.turn.body import validate
from stemma_lab.lint.recordings import is_recording, recorded_bodies

MAX_LINE_BYTES = 32 << 20
MAX_FILE_BYTES = 1 << 30
MAX_PROMPTS = 100_000
_ANTHROPIC_FIELDS = frozenset({"system", "anthropic_version", "stop_sequences", "anthropic_beta"})
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "image", "document"})
_WRAPPERS = ("body", "params", "request")
_PATHS = (
    ("/chat/completions", "chat"),
    ("/messages", "messages"),
    ("/responses", "responses"),
    ("/completions", "completions"),
)


@dataclass(frozen=True, slots=True)
class BodyPlace:
    """Where a prompt stands."""

    path: str
    line: int
    """From 1; of a document the number of its body."""


@dataclass(frozen=True, slots=True)
class Body:
    """One prompt that was asked for."""

    place: BodyPlace
    model: str
    chat: ChatRequest | None = None
    """None: it is plain text or ids."""
    text: str = ""
    token_ids: tuple[int, ...] | None = None


def read_bodies(path: Path) -> Iterator[Body]:
    """Yield the prompts of a file, in order.

    Raises TraceError naming the line that can't be read, StorageError if the file can't.
    """
    num_prompts = 0
    for number, value in _values(path):
        try:
            for body in _bodies(BodyPlace(str(path), number), value):
                num_prompts += 1
                if num_prompts > MAX_PROMPTS:
                    raise InvalidRequest(f"more than {MAX_PROMPTS:,} prompts; lint a sample")
                yield body
        except InvalidRequest as error:
            raise TraceError(f"{path.name}: {error}", line_number=number) from error


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, JSON value) of each line, or of each body of a document."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".json":
                yield from _document(path, file.read(MAX_LINE_BYTES + 1))
                return
            num_bytes = 0
            for number in range(1, MAX_FILE_BYTES):
                line = file.readline(MAX_LINE_BYTES + 1)
                num_bytes += len(line)
                if num_bytes > MAX_FILE_BYTES:
                    raise TraceError(f"{path.name}: more than 1 GiB; lint a sample", line_number=number)
                if not line:
                    return
                if line.strip():
                    yield number, _parsed(path, line, number)
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror or error}") from error


def _document(path: Path, content: bytes) -> Iterator[tuple[int, Any]]:
    value = _parsed(path, content, 1)
    if is_recording(value):
        try:
            value = recorded_bodies(value)
        except InvalidRequest as error:
            raise TraceError(f"{path.name}: {error}", line_number=1) from error
    if isinstance(value, dict) and isinstance(value.get("requests"), list):
        value = value["requests"]
    yield from enumerate(value if isinstance(value, list) else [value], start=1)


def _parsed(path: Path, content: bytes, number: int) -> Any:
    if len(content) > MAX_LINE_BYTES:
        message = f"{path.name}: more than {MAX_LINE_BYTES >> 20} MiB in one line"
        raise TraceError(message, line_number=number)
    try:
        return parse_json(content.strip(), "the line")
    except InvalidRequest as error:
        raise TraceError(f"{path.name}: {error}", line_number=number) from error


def _bodies(place: BodyPlace, value: Any) -> Iterator[Body]:
    if not isinstance(value, dict):
        raise InvalidRequest("not a JSON object")
    wrapped = (value[key] for key in _WRAPPERS if isinstance(value.get(key), dict))
    body = next(wrapped, value)
    body = {name: one for name, one in body.items() if name != "stemma"}
    kind = _kind(value.get("path") or value.get("url"), body)
    if kind == "completions":
        yield from _texts(place, body)
        return
    if kind == "messages":
        asked = validate(MessagesRequest, {"max_tokens": 1, "model": "", **body})
        chat = validate(ChatRequest, fields_of_messages(asked))
    elif kind == "responses":
        chat = _response(body)
    else:
        chat = validate(ChatRequest, body)
    yield Body(place, str(body.get("model") or ""), chat)


def _kind(path: object, body: Mapping[str, Any]) -> str:
    """Return which API a body is of: by its path, else by its fields."""
    if isinstance(path, str):
        route = path.partition("?")[0]
        for end, kind in _PATHS:
            if route.endswith(end):
                return kind
    if isinstance(body.get("messages"), list):
        return "messages" if _is_anthropic(body) else "chat"
    if "input" in body:
        return "responses"
    if "prompt" in body:
        return "completions"
    raise InvalidRequest("neither messages, input nor prompt: this is no request body")


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    if not _ANTHROPIC_FIELDS.isdisjoint(body):
        return True
    tools = body.get("tools")
    if isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools):
        return True
    contents = (one.get("content") for one in body["messages"] if isinstance(one, dict))
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    return any(isinstance(block, dict) and block.get("type") in _ANTHROPIC_BLOCKS for block in blocks)


def _response(body: Mapping[str, Any]) -> ChatRequest:
    """Return a Responses request as chat. What `previous_response_id` stands for isn't in the file."""
    asked = validate(ResponsesRequest, dict(body))
    messages = chat_messages(asked.input)
    if asked.instructions is not None:
        messages = [{"role": "system", "content": asked.instructions}, *messages]
    return validate(ChatRequest, fields_of_response(asked, messages))


def _texts(place: BodyPlace, body: Mapping[str, Any]) -> Iterator[Body]:
    """Yield the prompts of a completion: text, texts, ids, or lists of ids."""
    model, prompt = str(body.get("model") or ""), body.get("prompt")
    several: Sequence[Any] = [prompt] if _is_one(prompt) else prompt if isinstance(prompt, list) else ()
    if not several:
        raise InvalidRequest("prompt must be a text, texts, token ids, or lists of these")
    for one in several:
        if isinstance(one, str) and one:
            yield Body(place, model, text=one)
        elif isinstance(one, list) and one and all(type(item) is int and 0 <= item < 1 << 30 for item in one):
            yield Body(place, model, token_ids=tuple(one))
        else:
            raise InvalidRequest("prompt must be a text, texts, token ids, or lists of these")


def _is_one(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int)
