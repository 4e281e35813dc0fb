"""What `stemma bench` asks servers that know fewer fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest

from stemma.cli.client import RequestFailed
from stemma_lab.measure.driver import negotiate


def sse(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def client(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://server")


def text(piece: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": None}], **more}


async def test_extra_fields_are_left_out_for_servers_that_refuse_them() -> None:
    seen: list[dict[str, Any]] = []

    def strict(request: httpx.Request) -> httpx.Response:
        body = orjson.loads(request.content)
        seen.append(body)
        unknown = {"ignore_eos", "stream_options"} & body.keys()
        if unknown:
            return httpx.Response(422, json={"detail": f"unexpected {unknown}"})
        return httpx.Response(200, content=sse(text("ok")))

    async with client(strict) as http:
        target = await negotiate(http, "m", "completions")

    assert target.extra == {}
    assert len(seen) == 3


async def test_negotiation_gives_up_with_the_servers_own_words() -> None:
    async with client(lambda _: httpx.Response(400, json={"error": {"message": "no such model"}})) as http:
        with pytest.raises(RequestFailed, match="no such model"):
            await negotiate(http, "m", "chat")
