"""Requests of OpenAI's API to a scripted server."""

from __future__ import annotations

from typing import Any

import httpx
import orjson

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(COMPLETIONS_URL, json={"model": "scripted", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(CHAT_URL, json={"model": "scripted", "messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, url: str = COMPLETIONS_URL, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(url, json={"model": "scripted", "stream": True, **body})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [orjson.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


async def counted(client: httpx.AsyncClient, field: str) -> float:
    """Return how often a field was ignored that says so."""
    text = (await client.get("/metrics")).text
    found = [
        line
        for line in text.splitlines()
        if line.startswith(f'stemma_ignored_hints_total{{field="{field}"}}')
    ]
    return float(found[0].split()[-1]) if found else 0.0
