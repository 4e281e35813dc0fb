"""What clients send beside the question, as their own code sends it; `compatibility.md` has the tables."""

from __future__ import annotations

import json
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from openai import OpenAI  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Basel", "Vienna"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMES = ("level", "flood")
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
TOOLS: Any = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
ASK: Any = [{"role": "user", "content": "Is there a flood in Vienna?"}]


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_hints_of_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=4, verbosity="low", reasoning_effort="high", temperature=0.0
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_hints_of_responses(client: OpenAI) -> None:
    answer = client.responses.create(
        input="hi",
        max_output_tokens=4,
        max_tool_calls=3,
        truncation="auto",
        text={"verbosity": "high"},
        reasoning={"effort": "low"},
        include=["message.output_text.logprobs"],
    )
    assert answer.truncation == "auto"


def test_allowed_tools_of_chat(client: OpenAI) -> None:
    allowed: Any = {"mode": "required", "tools": [CHAT_TOOLS[1]]}
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        max_tokens=200,
        temperature=0,
        tools=CHAT_TOOLS,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )
    [call, *_] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "flood"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_beside_a_forced_tool(client: OpenAI, stream: bool) -> None:
    """As Instructor's RESPONSES_TOOLS sends it."""
    asked: Any = {
        "input": "Is there a flood in Vienna?",
        "max_output_tokens": 200,
        "temperature": 0,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "level"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    }
    if stream:
        events = list(client.responses.create(**asked, stream=True))
        answer = events[-1].response
    else:
        answer = client.responses.create(**asked)
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "level"
    assert json.loads(call.arguments)["city"] in ("Basel", "Vienna")


def test_counts_in_each_chunk(client: OpenAI) -> None:
    """As guidellm asks for them."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=6, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 6
