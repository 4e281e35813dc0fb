"""Chat requests in the words of many clients: thinking, tools, contents, log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from stemma.config.settings import Settings
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.answers.logprobs import TokenTexts
from stemma.server.app import create_app
from stemma.server.schemas.openai import ChatRequest
from tests.server.scripted_engine import ScriptedEngine

HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
KNOWING = "{{ enable_thinking }}/{{ thinking }}/{{ reasoning_effort }}{% for m in messages %}{% endfor %}"


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 9, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prompt_of(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_token_ids.tolist())


def knowing(
    tokenizer_path: Path, tmp_path: Path, settings: Settings
) -> tuple[ScriptedEngine, httpx.AsyncClient]:
    """A server whose template knows words for thinking."""
    raw = AutoTokenizer.from_pretrained(str(tokenizer_path))
    raw.chat_template = KNOWING
    raw.save_pretrained(str(tmp_path))
    engine = ScriptedEngine(Tokenizer(tmp_path))
    transport = httpx.ASGITransport(app=create_app(engine, settings))
    return engine, httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.mark.parametrize(
    ("body", "budget"),
    [
        ({}, None),
        ({"thinking_token_budget": 7}, 7),
        ({"max_reasoning_tokens": 7}, 7),
        ({"thinking_budget_tokens": 7}, 7),
        ({"reasoning_budget": 7}, 7),
        ({"reasoning_budget": -1}, None),
        ({"thinking_budget": 7}, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        ({"reasoning": {"max_tokens": 7}}, 7),
        ({"reasoning": {"effort": "low"}}, 2048),
        ({"reasoning_effort": "minimal"}, 512),
        ({"reasoning_effort": "medium"}, 8192),
        ({"reasoning_effort": "high"}, None),
        ({"reasoning_effort": "low", "thinking_token_budget": 7}, 7),
    ],
)
async def test_budgets_of_thinking(
    client: httpx.AsyncClient, engine: ScriptedEngine, body: dict[str, Any], budget: int | None
) -> None:
    await chat(client, **body)
    assert engine.requests[-1].params.max_thinking_tokens == budget


async def test_budgets_of_thinking_in_other_apis(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    await client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 9, "thinking": thinking})
    assert engine.requests[-1].params.max_thinking_tokens == 1024
    for reasoning, budget in (({"effort": "low"}, 2048), ({"max_tokens": 5}, 5), ({"effort": "none"}, None)):
        await client.post("/v1/responses", json={"input": "x", "reasoning": reasoning})
        assert engine.requests[-1].params.max_thinking_tokens == budget
    refused = await client.post("/v1/chat/completions", json={"messages": HELLO, "thinking_budget": -2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_budget")


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({}, "//"),
        ({"enable_thinking": True}, "True/True/"),
        ({"thinking": False}, "False/False/"),
        ({"thinking": {"type": "disabled"}}, "False/False/"),
        ({"reasoning": {"enabled": True}}, "True/True/"),
        ({"reasoning_effort": "none"}, "False/False/"),
        ({"reasoning_effort": "low"}, "//low"),
        ({"reasoning_budget": 0}, "False/False/"),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": "x"}}, "True/x/"),
    ],
)
async def test_a_template_gets_the_words_that_it_knows(
    tokenizer_path: Path, tmp_path: Path, settings: Settings, body: dict[str, Any], shown: str
) -> None:
    engine, client = knowing(tokenizer_path, tmp_path, settings)
    async with client:
        await chat(client, **body)
    assert prompt_of(engine) == shown
    assert engine.requests[-1].params.max_thinking_tokens == (0 if "reasoning_budget" in body else None)


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
async def test_a_choice_may_be_an_object(
    client: httpx.AsyncClient, engine: ScriptedEngine, choice: str
) -> None:
    prompts = []
    for given in (choice, {"type": choice}):
        await chat(client, tools=[TOOL], tool_choice=given)
        prompts.append((prompt_of(engine), engine.requests[-1].params.grammar))
    assert prompts[0] == prompts[1]


async def test_tools_that_a_vendor_runs_are_skipped(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    await chat(client, tools=[{"type": "web_search", "web_search": {}}, TOOL])
    assert "<|tools|>1" in prompt_of(engine)


def test_reasoning_may_be_left_out() -> None:
    seen = []
    for extra in ({}, {"reasoning": {"exclude": True}}, {"include_reasoning": False}):
        body = ChatRequest.model_validate({"messages": HELLO, **extra})
        seen.append(body.include_reasoning)
    assert seen == [True, False, False]


async def test_contents_that_are_empty(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    part = {"type": "text", "text": "4"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "reasoning": "hm"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "tool", "tool_call_id": "x", "content": [part]},
        {"role": "tool", "tool_call_id": "x", "content": None},
        {"role": "user", "content": "", "name": "ada"},
    ]
    await chat(client, messages=messages)
    assert prompt_of(engine) == (
        "<|user|>Hello\n<|assistant|>\n<|assistant|>No.\n<|tool|>4\n<|tool|>\n<|user|>\n<|assistant|>"
    )


async def test_functions_are_tools_in_older_words(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script.reply = '[{"name": "add", "arguments": {"a": 1}}]'
    old = {"functions": [FUNCTION], "function_call": {"name": "add"}, "max_tokens": 99}
    [choice] = (await chat(client, **old))["choices"]
    grammar = engine.requests[-1].params.grammar
    assert choice["message"]["function_call"] == {"name": "add", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    await chat(client, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}})
    assert engine.requests[-1].params.grammar == grammar

    body = {"messages": HELLO, "stream": True, **old}
    lines = (await client.post("/v1/chat/completions", json=body)).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    calls = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert "".join(call.get("arguments", "") for call in calls) == '{"a": 1}'
    assert (calls[0]["name"], chunks[-1]["finish_reason"]) == ("add", "function_call")

    engine.script.reply = None
    told = [
        *HELLO,
        {**choice["message"], "content": None},
        {"role": "function", "name": "add", "content": "4"},
    ]
    await chat(client, messages=told, functions=[FUNCTION])
    assert "<|tool|>4" in prompt_of(engine)


async def test_bytes_of_parts_of_characters_are_the_tokens_own(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.reply = "日本"
    answer = await chat(client, logprobs=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) > 2
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "日本"


def test_bytes_of_tokens_that_name_a_byte() -> None:
    class Named:
        token_bytes = None

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return "\ufffd"

        def token_text(self, token_id: int) -> str:
            return "<0xE6>" if token_id else "\ufffd"

    texts = TokenTexts(Named())  # type: ignore[arg-type]
    assert (texts.bytes_of(1), texts.bytes_of(0)) == (b"\xe6", "\ufffd".encode())
