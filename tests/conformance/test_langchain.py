"""langchain-openai: chat, streams, tools, structured output, the Responses API."""

from __future__ import annotations

from typing import Any, Literal

import pytest

pytest.importorskip("langchain_openai")

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr


class Report(BaseModel):
    """Whether a city is flooded."""

    city: Literal["Basel", "Vienna"]
    flood: bool


@pytest.fixture(scope="module")
def model(url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key=SecretStr("none"), model="tiny", max_retries=0)


def test_chat_and_stream_say_what_was_cached(model: ChatOpenAI) -> None:
    asked: Any = {"max_tokens": 8, "temperature": 0}
    whole = model.invoke("Tell me of rivers.", **asked)
    chunks = list(model.stream("Tell me of rivers.", **asked, stream_usage=True))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    usage = next(chunk.usage_metadata for chunk in chunks if chunk.usage_metadata)
    assert usage["input_token_details"]["cache_read"] == usage["input_tokens"] - 1


def test_a_tool_and_its_result(model: ChatOpenAI) -> None:
    question = HumanMessage("Is there a flood in Vienna?")
    bound = model.bind_tools([Report], tool_choice="any", strict=True)
    answer = bound.invoke([question], parallel_tool_calls=False)
    [call] = answer.tool_calls
    assert Report.model_validate(call["args"])
    result = ToolMessage("noted", tool_call_id=call["id"])
    last = model.invoke([question, answer, result], max_tokens=4)
    # What a random model draws may be an end at once; that the conversation was taken is said by its usage.
    usage = last.usage_metadata
    assert usage is not None
    assert 1 <= usage["output_tokens"] <= 4
    assert usage["input_token_details"]["cache_read"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: ChatOpenAI, method: Any) -> None:
    asked = model.with_structured_output(Report, method=method, strict=True)
    found = asked.invoke("The level at Vienna is 241 cm.")
    assert isinstance(found, Report)


def test_the_responses_api(model: ChatOpenAI, url: str) -> None:
    responses = ChatOpenAI(
        base_url=f"{url}/v1", api_key=SecretStr("none"), model="tiny", use_responses_api=True, max_retries=0
    )
    first = responses.invoke("Tell me of rivers.", max_tokens=8)
    second = responses.invoke("Go on.", max_tokens=4, previous_response_id=first.response_metadata["id"])
    assert second.usage_metadata is not None
    assert second.usage_metadata["input_token_details"]["cache_read"] > 0
    assert isinstance(responses.with_structured_output(Report).invoke("Flood?"), Report)
