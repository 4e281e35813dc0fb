"""Anthropic's client: messages, streams, tools, marks, counts, errors."""

from __future__ import annotations

from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")

from anthropic import Anthropic  # noqa: E402

ASK: Any = [{"role": "user", "content": "Is there a flood in Vienna?"}]
TOOL: Any = {
    "name": "level",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Basel", "Vienna"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True)


def test_a_message_and_its_stream(client: Anthropic) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 12, "messages": ASK, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    assert whole.stop_reason == "max_tokens"
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    [part] = last.content
    assert part.type == "text"
    assert text == whole.content[0].text == part.text
    assert last.usage.output_tokens == 12
    assert (
        last.usage.cache_read_input_tokens
        == client.messages.count_tokens(model="tiny", messages=ASK).input_tokens - 1
    )


def test_betas_and_tools_of_their_servers(client: Anthropic) -> None:
    asked: Any = {
        "model": "tiny",
        "max_tokens": 6,
        "messages": ASK,
        "betas": ["context-management-2025-06-27"],
    }
    asked["tools"] = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    asked["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    whole = client.beta.messages.create(**asked)
    assert whole.context_management is not None
    assert whole.context_management.applied_edits == []
    with client.beta.messages.stream(**asked) as stream:
        last = stream.get_final_message()
    assert last.context_management == whole.context_management


def test_stop_sequences(client: Anthropic) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 12, "messages": ASK, "extra_body": {"temperature": 0}}
    text = client.messages.create(**asked).content[0].text
    stopped = client.messages.create(**asked, stop_sequences=[text[4:7]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[4:7])
    assert stopped.content[0].text == text[: text.index(text[4:7])]


def test_a_tool_and_its_result(client: Anthropic) -> None:
    choices: Any = ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "level"})
    for choice in choices:
        asked: Any = {"model": "tiny", "max_tokens": 256, "tools": [TOOL], "tool_choice": choice}
        answer = client.messages.create(**asked, messages=ASK)
        assert answer.stop_reason == "tool_use"
        [call] = answer.content
        assert (call.type, call.name) == ("tool_use", "level")
        assert call.input["city"] in ("Basel", "Vienna")

        with client.messages.stream(**asked, messages=ASK) as stream:
            [streamed] = stream.get_final_message().content
        assert streamed.type == "tool_use"
        given: Any = streamed.input
        assert given["city"] in ("Basel", "Vienna")

    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "241 cm"}]}
    messages = [
        *ASK,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    last: Any = {"model": "tiny", "max_tokens": 8, "tools": [TOOL], "tool_choice": {"type": "none"}}
    done = client.messages.create(**last, messages=messages, extra_body={"temperature": 0})
    assert done.content[0].type == "text"


def test_marks_are_counted_as_written_and_read(client: Anthropic) -> None:
    mark: Any = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [{"type": "text", "text": "You know every river there is. " * 6, "cache_control": mark}]
    asked: Any = {"model": "tiny", "max_tokens": 2, "system": system, "messages": ASK}
    first, second = (client.messages.create(**asked).usage for _ in range(2))

    assert first.cache_creation_input_tokens > 60
    assert first.cache_creation is not None
    assert first.cache_creation.ephemeral_1h_input_tokens == first.cache_creation_input_tokens
    assert second.cache_creation_input_tokens == 0
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens
    sums = {
        u.input_tokens + u.cache_creation_input_tokens + u.cache_read_input_tokens for u in (first, second)
    }
    assert len(sums) == 1


def test_errors_are_the_clients_own(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=1, messages=ASK)
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(model="tiny", max_tokens=1, messages=image)
