"""OpenAI's client: chat with tools and schemas, responses, their streams, errors."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai")

from openai import AsyncOpenAI, OpenAI  # noqa: E402
from openai.types.responses import Response  # noqa: E402
from pydantic import BaseModel  # noqa: E402

ASK: Any = [{"role": "user", "content": "Is there a flood in Vienna?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Basel", "Vienna"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "level", "parameters": SCHEMA, "strict": True}}
TOOL: Any = {"type": "function", "name": "level", "parameters": SCHEMA, "strict": True}


class Report(BaseModel):
    city: Literal["Basel", "Vienna"]
    flood: bool


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


def test_a_forced_call_and_its_stream(client: OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "level"}}):
        asked: Any = {
            "model": "tiny",
            "messages": ASK,
            "tools": [CHAT_TOOL],
            "tool_choice": choice,
            "seed": 1,
        }
        whole = client.chat.completions.create(**asked, parallel_tool_calls=False)
        [call] = whole.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "level"
        assert json.loads(call.function.arguments)["city"] in ("Basel", "Vienna")

        pieces, name = "", None
        for chunk in client.chat.completions.create(**asked, parallel_tool_calls=False, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                assert part.function is not None
                name = part.function.name or name
                pieces += part.function.arguments or ""
        assert (name, json.loads(pieces)) == ("level", json.loads(call.function.arguments))


def test_parse(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Report)
    assert isinstance(parsed.choices[0].message.parsed, Report)

    tool = openai.pydantic_function_tool(Report)
    called = client.chat.completions.parse(
        model="tiny", messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    [call] = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Report)

    answer = client.responses.parse(model="tiny", input="Is there a flood?", text_format=Report)
    assert isinstance(answer.output_parsed, Report)


def test_a_response_with_a_call_and_its_result(client: OpenAI) -> None:
    first = client.responses.create(
        model="tiny",
        input="Is there a flood in Vienna?",
        instructions="Use tools.",
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    [call] = first.output
    assert call.type == "function_call"
    assert call.name == "level"
    assert json.loads(call.arguments)["city"] in ("Basel", "Vienna")

    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "241 cm"}
    second = client.responses.create(
        model="tiny",
        previous_response_id=first.id,
        instructions="Use tools.",
        input=[result],
        tools=[TOOL],
        tool_choice="none",
        max_output_tokens=12,
        temperature=0,
    )
    assert second.status == "incomplete"
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_conversation_is_a_cached_prefix(client: OpenAI) -> None:
    first = client.responses.create(
        model="tiny", input="Tell me of rivers.", max_output_tokens=24, temperature=0
    )
    assert first.usage is not None
    held = first.usage.input_tokens + first.usage.output_tokens
    second = client.responses.create(
        model="tiny", input="Go on.", previous_response_id=first.id, max_output_tokens=4
    )
    assert second.usage is not None
    # The last token that was sampled was never computed.
    assert second.usage.input_tokens_details.cached_tokens >= held - 1
    assert client.responses.retrieve(second.id) == second
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model="tiny", input="x", previous_response_id=first.id)
    assert gone.value.param == "previous_response_id"


def test_a_response_stream(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "Tell me of rivers.", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    last = events[-1].response
    assert isinstance(last, Response)
    assert last.output_text == whole.output_text
    assert last.usage is not None
    assert last.usage.input_tokens_details.cached_tokens == last.usage.input_tokens - 1


def test_a_response_stream_with_a_call(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "Flood?", "tools": [TOOL], "tool_choice": "required"}
    with client.responses.stream(**asked, parallel_tool_calls=False) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        [call] = stream.get_final_response().output
    assert call.type == "function_call"
    assert "".join(pieces) == call.arguments
    assert json.loads(call.arguments)["city"] in ("Basel", "Vienna")


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("lark", 'start: "level: " ("Basel" | "Vienna") "\\n"'), ("regex", "level: (Basel|Vienna)\\n")],
)
def test_a_forced_tool_of_plain_text_follows_its_grammar(
    client: OpenAI, syntax: str, definition: str
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools = [TOOL, {"type": "custom", "name": "say", "format": form}, {"type": "web_search"}]
    asked: Any = {"model": "tiny", "input": "Flood?", "tools": tools}
    asked |= {"tool_choice": {"type": "custom", "name": "say"}, "temperature": 0}
    [whole] = client.responses.create(**asked).output
    assert whole.type == "custom_tool_call"
    assert whole.input in ("level: Basel\n", "level: Vienna\n")
    with client.responses.create(**asked, stream=True) as stream:
        events = list(stream)
    pieces = [one.delta for one in events if one.type == "response.custom_tool_call_input.delta"]
    [done] = [one for one in events if one.type == "response.custom_tool_call_input.done"]
    assert "".join(pieces) == done.input == whole.input
    assert events[-1].type == "response.completed"
    told = [
        *ASK,
        whole.model_dump(),
        {"type": "custom_tool_call_output", "call_id": whole.call_id, "output": "No."},
    ]
    assert client.responses.create(model="tiny", input=told, max_output_tokens=4, tools=tools).id


async def test_the_async_client(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.responses.create(model="tiny", input="Hi", max_output_tokens=6, stream=True)
        names = [event.type async for event in stream]
    assert names[-1] in ("response.incomplete", "response.completed")


@pytest.mark.parametrize(
    "body", [{"model": "other", "input": "x"}, {"model": "tiny", "input": [{"type": "item_reference"}]}]
)
def test_errors_are_the_clients_own(client: OpenAI, body: dict[str, Any]) -> None:
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
        client.responses.create(**body)
