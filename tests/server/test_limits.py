"""What an operator allows a request: length of prompt and answer, sequences at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from stemma.config.server_settings import RequestSettings
from stemma.config.settings import Settings
from stemma.server.app import create_app
from tests.server.scripted_engine import ScriptedEngine

Client = Callable[..., httpx.AsyncClient]


@pytest.fixture
async def client_with(engine: ScriptedEngine, settings: Settings) -> AsyncIterator[Client]:
    """Return a client of a server with the given `RequestSettings`."""
    clients: list[httpx.AsyncClient] = []

    def make(**limits: Any) -> httpx.AsyncClient:
        limited = settings.model_copy(update={"requests": RequestSettings(**limits)})
        transport = httpx.ASGITransport(app=create_app(engine, limited), raise_app_exceptions=False)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
        return clients[-1]

    yield make
    for each in clients:
        await each.aclose()


@pytest.mark.parametrize(("truncation", "kept"), [("left", "efgh"), ("right", "abcd")])
async def test_a_long_prompt_is_cut(
    client_with: Client, engine: ScriptedEngine, truncation: str, kept: str
) -> None:
    client = client_with(max_input_tokens=4, truncation=truncation)
    response = await client.post("/generate", json={"inputs": "abcdefgh"})

    assert response.status_code == 200
    assert engine.tokenizer.decode(engine.requests[0].prompt_token_ids.tolist()) == kept


async def test_a_long_prompt_is_refused(client_with: Client) -> None:
    client = client_with(max_input_tokens=4)
    response = await client.post("/generate", json={"inputs": "abcdefgh"})

    assert response.status_code == 422
    assert (
        "maximum context length is 4 tokens, without output, and the prompt has 8 tokens"
        in response.json()["error"]
    )
    assert (await client.post("/generate", json={"inputs": "abcd"})).status_code == 200


@pytest.mark.parametrize("wanted", [None, 5000, 3])
async def test_answers_are_capped(client_with: Client, engine: ScriptedEngine, wanted: int | None) -> None:
    body: dict[str, object] = {"prompt": "ab"} if wanted is None else {"prompt": "ab", "max_tokens": wanted}
    response = await client_with(max_output_tokens=7).post("/generate", json=body)

    assert response.status_code == 200
    assert engine.requests[0].params.max_tokens == (3 if wanted == 3 else 7)


async def test_n_is_limited(client_with: Client) -> None:
    response = await client_with(max_n=2).post("/generate", json={"prompt": "ab", "n": 3, "max_tokens": 2})

    assert response.status_code == 422
    assert "between 1 and 2" in response.json()["error"]
