"""MindIE's tokenizer over HTTP."""

from __future__ import annotations

import httpx
from tests.server.scripted_engine import ScriptedEngine


async def test_tokens_as_text_and_as_ids(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    as_text = await client.post("/v1/tokenizer", json={"inputs": "ab", "do_decode": True})
    as_ids = await client.post("/v1/tokenizer", json={"inputs": "ab", "do_decode": False})

    assert as_text.json() == {"token_number": 2, "tokens": ["a", "b"]}
    assert as_ids.json() == {"token_number": 2, "tokens": engine.tokenizer.encode("ab").tolist()}


async def test_bad_input(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/tokenizer", json={"inputs": 3})).status_code == 422
