"""Hugging Face's InferenceClient over TGI's shape and chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from huggingface_hub import InferenceClient

ASK: list[Any] = [{"role": "user", "content": "Is there a flood in Vienna?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Basel", "Vienna"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "level", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(url: str) -> InferenceClient:
    return InferenceClient(url)


def test_text_generation(client: InferenceClient) -> None:
    whole = client.text_generation("The river", max_new_tokens=8, details=True)
    parts = list(client.text_generation("The river", max_new_tokens=8, details=True, stream=True))
    assert "".join(part.token.text for part in parts) == whole.generated_text
    assert all(isinstance(part.token.id, int) for part in parts)
    assert parts[-1].generated_text == whole.generated_text


def test_a_grammar(client: InferenceClient) -> None:
    grammar: Any = {"type": "json", "value": SCHEMA}
    text = client.text_generation("Flood?", max_new_tokens=128, grammar=grammar)
    assert json.loads(text)["city"] in ("Basel", "Vienna")


def test_chat_with_a_tool(client: InferenceClient) -> None:
    answer = client.chat_completion(ASK, tools=[TOOL], tool_choice="required", max_tokens=256)
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    call = calls[0]
    assert call.function.name == "level"
    assert json.loads(call.function.arguments)["city"] in ("Basel", "Vienna")
    parts = list(client.chat_completion(ASK, max_tokens=8, stream=True))
    assert all(isinstance(part.choices[0].delta.content or "", str) for part in parts)
    assert parts[-1].choices[0].finish_reason in ("stop", "length")
