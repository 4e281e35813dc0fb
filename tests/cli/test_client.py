"""What servers other than ours send; each dialect as a scripted response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest

from stemma.cli.client import RequestFailed, first_model, stream_answer


def sse(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def client(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://server")


def text(piece: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": None}], **more}


async def answer_to(*chunks: dict[str, Any], **options: Any) -> Any:
    async with client(lambda _: httpx.Response(200, content=sse(*chunks))) as http:
        return await stream_answer(http, "/v1/completions", {}, **options)


async def test_usage_of_vllm_without_cached_tokens() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": None}
    answer = await answer_to(text("a"), text("b"), {"choices": [], "usage": usage})

    assert (answer.text, answer.num_prompt_tokens, answer.num_generated_tokens) == ("ab", 9, 5)
    assert answer.num_cached_tokens is None


@pytest.mark.parametrize(
    "last",
    [
        {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}},
        {"usage": {"prompt_tokens": 9, "prompt_cache_hit_tokens": 7}},
        {"timings": {"cache_n": 7, "prompt_n": 2}},
    ],
)
async def test_cached_tokens_in_every_dialect(last: dict[str, Any]) -> None:
    answer = await answer_to(text("a"), {"choices": [], **last})

    assert answer.num_cached_tokens == 7


async def test_without_usage_tokens_are_counted_or_pieces_are() -> None:
    counted = await answer_to(text("one two"), text(" three"), count_tokens=lambda t: len(t.split()))
    pieces = await answer_to(text("one two"), text(" three"))

    assert (counted.num_generated_tokens, pieces.num_generated_tokens) == (3, 2)


async def test_chat_deltas_and_reasoning() -> None:
    deltas = ({"role": "assistant"}, {"reasoning_content": "hm "}, {"content": "yes"}, {"content": None})
    answer = await answer_to(*({"choices": [{"index": 0, "delta": delta}]} for delta in deltas))

    assert answer.text == "hm yes"


async def test_errors() -> None:
    with pytest.raises(RequestFailed, match="it broke"):
        await answer_to(text("a"), {"error": {"message": "it broke"}})
    async with client(lambda _: httpx.Response(500, content=b"<html>")) as http:
        with pytest.raises(RequestFailed, match="HTTP 500: <html>"):
            await stream_answer(http, "/v1/completions", {})
        with pytest.raises(RequestFailed, match="lists no model"):
            await first_model(http)
    async with client(lambda _: httpx.Response(200, content=b"data: {oops\n\n")) as http:
        with pytest.raises(RequestFailed, match="not JSON"):
            await stream_answer(http, "/v1/completions", {})
