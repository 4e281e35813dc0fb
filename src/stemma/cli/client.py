"""A small client for any OpenAI-compatible server: streams an answer and measures it.

Servers differ in what they report. Token counts come from ``usage`` if the server sends it, else from a
tokenizer if there is one, else from the number of pieces; cached tokens from OpenAI's, DeepSeek's or
llama.cpp's field, else they are unknown (None), never zero.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from stemma.errors import StemmaError
from stemma.http import async_http_client
from stemma.terminal_text import visible, visible_lines

TokenCounter = Callable[[str], int]


class RequestFailed(StemmaError):
    """The server refused or broke off; `status` is 0 if there was no HTTP status."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class StreamedAnswer:
    """One streamed answer; times in seconds of `time.perf_counter`."""

    started_at: float
    text: str = ""
    first_token_at: float | None = None
    finished_at: float = 0.0
    piece_times: list[float] = field(default_factory=list)
    """When each piece of text came."""
    num_prompt_tokens: int | None = None
    num_generated_tokens: int = 0
    num_cached_tokens: int | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    """Only Stemma says."""
    miss_reason: str | None = None
    miss_detail: str | None = None
    finish_reason: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token; to the end if there was no text."""
        return (self.first_token_at or self.finished_at) - self.started_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time per further token; None with fewer than two tokens."""
        if self.first_token_at is None or self.num_generated_tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.num_generated_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.finished_at - self.started_at


def make_http(base_url: str, api_key: str | None = None, timeout_s: float = 600.0) -> httpx.AsyncClient:
    """Return an HTTP client without a limit on connections; `base_url` is the server's root or ``.../v1``."""
    root = base_url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    # Servers on uvicorn close a connection that was idle for 5 s: it must not be used again at that moment.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
    timeout = httpx.Timeout(timeout_s, connect=10.0)
    return async_http_client(base_url=root, headers=headers, limits=limits, timeout=timeout)


async def first_model(http: httpx.AsyncClient) -> str:
    """Return the name of the first model that the server lists."""
    try:
        response = await http.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise RequestFailed(f"{http.base_url} lists no model: {error}") from error


async def stream_answer(
    http: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    *,
    on_text: Callable[[str], None] | None = None,
    count_tokens: TokenCounter | None = None,
) -> StreamedAnswer:
    """POST `body` to `path` with streaming on and return the measured answer; raise RequestFailed.

    `on_text` is called with each piece of text as it comes.
    """
    answer = StreamedAnswer(time.perf_counter())
    pieces: list[str] = []
    counted = False
    try:
        async for chunk in _chunks(http, path, {**body, "stream": True}):
            if "error" in chunk:
                raise RequestFailed(_message(chunk))
            text = _text_of(chunk, answer)
            if text:
                now = time.perf_counter()
                answer.first_token_at = answer.first_token_at or now
                answer.piece_times.append(now)
                pieces.append(text)
                if on_text is not None:
                    on_text(text)
            counted = _read_usage(chunk, answer) or counted
    except httpx.HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    except orjson.JSONDecodeError as error:
        raise RequestFailed(f"an event of the stream is not JSON: {error}") from error
    answer.finished_at = answer.piece_times[-1] if answer.piece_times else time.perf_counter()
    answer.text = "".join(pieces)
    if not counted:
        answer.num_generated_tokens = count_tokens(answer.text) if count_tokens else len(pieces)
    return answer


async def _chunks(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    headers = {"content-type": "application/json"}
    async with http.stream("POST", path, content=orjson.dumps(body), headers=headers) as response:
        if response.status_code != 200:
            content = await response.aread()
            raise RequestFailed(_refusal(content, response.status_code), response.status_code)
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                return
            chunk = orjson.loads(data)
            if isinstance(chunk, dict):
                yield chunk


def _refusal(content: bytes, status: int) -> str:
    try:
        return f"HTTP {status}: {_message(orjson.loads(content))}"
    except (orjson.JSONDecodeError, AttributeError):
        return f"HTTP {status}: {visible(content[:200].decode(errors='replace'))}"


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return visible_lines(str(error.get("message", error) if isinstance(error, dict) else error))


def _text_of(chunk: dict[str, Any], answer: StreamedAnswer) -> str:
    """Return the new text of a chunk of either endpoint; note why it finished."""
    text = ""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text += choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return text


def _read_usage(chunk: dict[str, Any], answer: StreamedAnswer) -> bool:
    """Take the counts that the chunk carries; return whether generated tokens were among them."""
    timings = chunk.get("timings") or {}
    if isinstance(timings.get("cache_n"), int):
        answer.num_cached_tokens = timings["cache_n"]
    usage = chunk.get("usage")
    if not usage:
        return False
    answer.num_prompt_tokens = usage.get("prompt_tokens", answer.num_prompt_tokens)
    details = usage.get("prompt_tokens_details") or {}
    for cached in (details.get("cached_tokens"), usage.get("prompt_cache_hit_tokens")):
        if isinstance(cached, int):
            answer.num_cached_tokens = cached
            break
    own = usage.get("stemma") or {}
    answer.cached_by_tier = own.get("cached_tokens_by_tier") or {}
    answer.miss_reason = own.get("miss_reason")
    answer.miss_detail = own.get("miss_detail")
    if isinstance(usage.get("completion_tokens"), int):
        answer.num_generated_tokens = usage["completion_tokens"]
        return True
    return False
