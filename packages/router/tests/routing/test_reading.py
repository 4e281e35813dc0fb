"""A router with a tokenizer reads prompts as servers do, adapters included; it gets the same ids."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from tests.server.scripted_engine import ScriptedEngine

from stemma.config.settings import Settings
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.app import create_app
from stemma.told import Told, ToldModel, adapter_root
from stemma_router.kv_events.names import chain_of
from stemma_router.routing.asking import PromptEncoder
from stemma_router.routing.served_fleet import ServedFleet
from stemma_router.routing.server_list import ServerList

TEMPLATE = (
    "{% if not enable_thinking is defined or enable_thinking %}<think>{% endif %}"
    "{{ reasoning_effort }}|{{ style }}|{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAID = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def reading(tokenizer_path: Path) -> Tokenizer:
    tokenizer = Tokenizer(tokenizer_path)
    tokenizer.transformers_tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": SAID}),
        ("/v1/chat/completions", {"messages": SAID, "chat_template_kwargs": {"style": "terse"}}),
        ("/v1/chat/completions", {"messages": SAID, "reasoning_effort": "low"}),
        ("/v1/chat/completions", {"messages": SAID, "reasoning_effort": "none"}),
        ("/v1/chat/completions", {"messages": SAID, "enable_thinking": False}),
        ("/v1/chat/completions", {"messages": SAID, "tools": [{"type": "function", "function": TOOL}]}),
        ("/v1/chat/completions", {"messages": SAID, "add_generation_prompt": False}),
        ("/v1/messages", {"messages": SAID, "system": "Be kind.", "max_tokens": 5}),
        (
            "/v1/messages",
            {"messages": SAID, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        ),
        ("/v1/responses", {"input": SAID, "reasoning": {"effort": "high"}}),
    ],
)
async def test_a_router_reads_a_prompt_as_the_server_does(
    reading: Tokenizer, settings: Settings, path: str, body: dict[str, Any]
) -> None:
    engine = ScriptedEngine(reading)
    transport = httpx.ASGITransport(app=create_app(engine, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, json={"model": "scripted", **body})
        assert answer.status_code == 200, answer.text
    encoder = PromptEncoder(reading)
    tokens = await encoder.tokens(path, body)
    encoder.close()
    assert tokens is not None
    assert tokens.tolist() == engine.requests[-1].prompt_token_ids.tolist()


async def test_a_prompt_for_an_adapter_is_looked_for_behind_its_root() -> None:
    """By the key that its server tells, not by the base model's blocks."""
    told = Told(serves=ToldModel(block_size=64, model="m", kv="k", adapters=((adapter_root("lora"), 77),)))
    content = orjson.dumps(told.as_json())
    silent = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    client = httpx.AsyncClient(transport=silent)
    served = ServedFleet(ServerList(["http://127.0.0.1:7001"]), "cache-aware", client)
    tokens = list(range(200))
    async with served.serving(), asyncio.timeout(20):
        [member] = served.fleet.members
        while member.told.serves is None:
            await asyncio.sleep(0.01)
        ids = np.array(tokens, dtype=np.int32)
        for model, root in (("lora", 77), ("base", 0), (None, 0)):
            ask = await served.ask("/v1/completions", {"prompt": tokens, "model": model}, {})
            assert list(ask.chain) == chain_of(ids, 64, root)
        tgi = {"inputs": tokens, "parameters": {"adapter_id": "lora"}}
        assert list((await served.ask("/generate", tgi, {})).chain) == chain_of(ids, 64, 77)
