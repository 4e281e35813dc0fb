"""Long prompts are tokenized in threads: meanwhile the server answers others."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any

import httpx
import pytest

from stemma.server.turn.intake import AT_ONCE_CHARS
from tests.server.scripted_engine import ScriptedEngine

LONG = "x" * (AT_ONCE_CHARS + 1)


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/v1/completions", {"prompt": LONG}, "encode_pieces"),
        ("/generate", {"inputs": LONG}, "encode_pieces"),
        ("/generate", {"inputs": LONG, "parameters": {"truncate": 2}}, "encode_pieces"),
        ("/generate", {"prompt": LONG}, "encode_pieces"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "short"}]},
            "render_chat",
        ),
    ],
)
async def test_tokenizing_does_not_stop_the_server(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    method: str,
) -> None:
    begun, finish = threading.Event(), threading.Event()
    real = getattr(engine.tokenizer, method)

    def slow(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert finish.wait(10)
        return real(*args, **kwargs)

    monkeypatch.setattr(engine.tokenizer, method, slow)
    waiting = asyncio.create_task(client.post(path, json={"model": "scripted", **body}))
    while not (begun.is_set() or waiting.done()):
        await asyncio.sleep(0.001)
    assert (await client.get("/health")).status_code == 200
    assert not waiting.done()
    finish.set()
    assert (await waiting).status_code == 200


async def test_between_two_prompts_of_a_request_others_have_their_turn(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short prompts are tokenized on the event loop; a request may bring a thousand of them."""
    events: list[str] = []
    real = engine.tokenizer.encode

    def noted(text: str, **options: Any) -> Any:
        if text.startswith("prompt"):
            events.append("tokenized")
        return real(text, **options)

    async def take_turns() -> None:
        while True:
            events.append("other")
            await asyncio.sleep(0)

    monkeypatch.setattr(engine.tokenizer, "encode", noted)
    others = asyncio.create_task(take_turns())
    prompts = [f"prompt {number}" for number in range(50)]
    body = {"model": "scripted", "prompt": prompts, "max_tokens": 1}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    others.cancel()
    assert events.count("tokenized") == len(prompts)
    assert ("tokenized", "tokenized") not in pairwise(events)
