"""Answers have a ledger: what one may hold is reckoned, bounded and taken before any work is done for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from stemma.config.server_settings import RequestSettings
from stemma.server.app import create_app
from tests.server.door.rig import CHAT, PROMPT, Rig
from tests.server.scripted_engine import ScriptedEngine

ECHO = {"prompt": [72, 101] * 500, "echo": True, "max_tokens": 0, "return_token_ids": True}
MESSAGES = {"model": "scripted", **CHAT}
RESPONSE = {"model": "scripted", "input": "hi"}


class NoTokenizer:
    """A tokenizer that must not be asked for anything."""

    def __init__(self, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        def encode(*_: object, **__: object) -> None:
            raise AssertionError("a refusal comes before tokenizing")

        for name in ("encode", "render_chat"):
            monkeypatch.setattr(engine.tokenizer, name, encode)


async def test_echoes_alone_pass_the_same_door(engine: ScriptedEngine, tmp_path: Path) -> None:
    """A tenant of two requests a minute got 25,600 answers."""
    rig = Rig(engine, tmp_path, "requests_per_minute = 3")
    many = await rig.ask("ada", {**ECHO, "n": 4})
    assert (many.status_code, many.json()["error"]["param"]) == (400, "n")
    two = await rig.ask("ada", {**ECHO, "prompt": [[72], [73]]})
    assert (two.status_code, [one["text"] for one in two.json()["choices"]]) == (200, ["i", "j"])
    assert (await rig.ask("ada", ECHO)).status_code == 429
    assert set((await rig.held()).values()) == {0}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**ECHO, "n": 200}, "prompt"),
        ({**ECHO, "echo": False, "max_tokens": 1, "n": 200}, "prompt"),
        ({"prompt": "x" * 3000, "echo": True, "n": 200, "max_tokens": 1}, "prompt"),
        ({"prompt": [72] * 900, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        ({"prompt": [72] * 300, "echo": True, "logprobs": 20, "n": 200, "max_tokens": 1}, "prompt_logprobs"),
        ({"prompt": "x", "logprobs": 20, "max_tokens": 900}, "logprobs"),
        ({"prompt": "x", "n": 200, "max_tokens": 100}, "max_tokens"),
        ({"prompt": "x", "n": 20, "max_tokens": 100, "logit_bias": {"72": 100}}, None),
    ],
)
async def test_an_answer_too_large_for_the_operator_is_refused_by_name(
    engine: ScriptedEngine, tmp_path: Path, body: dict[str, Any], param: str | None
) -> None:
    rig = Rig(engine, tmp_path, "")
    limits = RequestSettings(max_answer_bytes=3_000_000)
    rig.client = client_of(engine, rig, limits)
    answer = await rig.ask("ada", body)
    if param is None:
        assert answer.status_code == 200, answer.text
        return
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "--max-answer-bytes" in answer.text
    assert engine.requests == []


def client_of(engine: ScriptedEngine, rig: Rig, limits: RequestSettings) -> httpx.AsyncClient:
    settings = rig.settings.model_copy(update={"requests": limits})
    transport = httpx.ASGITransport(app=create_app(engine, settings), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", MESSAGES),
        ("/v1/responses/input_tokens", RESPONSE),
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/chat/completions", MESSAGES),
        ("/v1/responses", RESPONSE),
        ("/v1/completions", PROMPT),
        ("/generate", {"inputs": "hi"}),
    ],
)
async def test_a_refusal_comes_before_tokenizing(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    rig = Rig(engine, tmp_path, "requests_per_minute = 1")
    assert (await rig.ask("ada", body, path)).status_code == 200
    NoTokenizer(engine, monkeypatch)
    refused = await rig.ask("ada", body, path)
    assert refused.status_code == 429, refused.text
    assert (await rig.held())["body_bytes"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**MESSAGES, "n": 2, "temperature": 1.0}),
        ("/v1/completions", {**PROMPT, "n": 2}),
        ("/v1/completions", {**PROMPT, "prompt": ["a", "b"]}),
        ("/generate", {"prompt": "x", "n": 2}),
        ("/generate", {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}}),
    ],
)
async def test_sequences_are_counted_before_tokenizing_and_a_refusal_costs_none(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    rig = Rig(engine, tmp_path, "requests_per_minute = 2")
    assert (await rig.ask("ada", PROMPT)).status_code == 200
    with monkeypatch.context() as patched:
        NoTokenizer(engine, patched)
        for _ in range(3):
            assert (await rig.ask("ada", body, path)).status_code == 429
    assert (await rig.ask("ada", PROMPT)).status_code == 200
    assert set((await rig.held()).values()) == {0}


async def test_conversations_are_requests(engine: ScriptedEngine, tmp_path: Path) -> None:
    rig = Rig(engine, tmp_path, "requests_per_minute = 2")
    made = await rig.ask("ada", {}, "/v1/conversations")
    path = f"/v1/conversations/{made.json()['id']}/items"
    items = {"items": [{"role": "user", "content": "hi"}]}
    assert (await rig.ask("ada", items, path)).status_code == 200
    assert (await rig.ask("ada", items, path)).status_code == 429
    assert (await rig.client.get(path, headers=rig.keys["ada"])).status_code == 429


async def test_answers_share_their_memory_and_give_it_back(engine: ScriptedEngine, tmp_path: Path) -> None:
    rig = Rig(engine, tmp_path, "", answer_memory=4_000_000)
    engine.script.delay_s = 0.05
    large = {"prompt": "x", "logprobs": 20, "max_tokens": 150}
    running = asyncio.create_task(rig.ask("ada", large))
    while not engine.requests:
        await asyncio.sleep(0.01)
    assert 1_000_000 < (await rig.held())["answer_bytes"] < 2_000_000
    refused = await rig.ask("ada", large)
    assert (refused.status_code, "bytes of answers" in refused.text) == (429, True)
    assert (await rig.ask("ada", PROMPT)).status_code == 200
    engine.script.delay_s = 0.0
    assert (await rig.ask("bob", large)).status_code == 200
    assert (await running).status_code == 200
    assert (await rig.held())["answer_bytes"] == 0


async def test_prompt_logprobs_come_once_a_prompt(client: httpx.AsyncClient) -> None:
    """9 KB became 733 MB, a copy for each choice."""
    body = {"prompt": [[72] * 200, [73] * 200], "prompt_logprobs": 5, "max_tokens": 1}
    sizes = []
    for n in (1, 20):
        answer = await client.post("/v1/completions", json={**body, "n": n})
        choices = answer.json()["choices"]
        assert [one["index"] for one in choices if "prompt_logprobs" in one] == [0, n]
        assert len(choices[n]["prompt_logprobs"]) == 200
        sizes.append(len(answer.content))
    assert sizes[1] < 1.2 * sizes[0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 4}, "top_logprobs"),
        ("/v1/completions", {**PROMPT, "logprobs": 4}, "logprobs"),
        ("/v1/completions", {**PROMPT, "prompt_logprobs": 4}, "prompt_logprobs"),
    ],
)
async def test_the_operator_bounds_logprobs(
    engine: ScriptedEngine, tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    rig = Rig(engine, tmp_path, "")
    rig.client = client_of(engine, rig, RequestSettings(max_logprobs=3))
    answer = await rig.ask("ada", body, path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "--max-logprobs" in answer.text
    few = {name: 3 if name == param else value for name, value in body.items()}
    assert (await rig.ask("ada", few, path)).status_code == 200
