"""Structured output and forced tool calls over HTTP: a random model writes what it is told to."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.conftest import Served

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    },
]
ASK = [{"role": "user", "content": "How is the weather?"}]


def chat(served: Served, **body: object) -> dict:
    response = served.post("/v1/chat/completions", messages=ASK, max_tokens=200, seed=5, **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_followed(served: Served, stream: bool):
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    if not stream:
        choice = chat(served, response_format=wanted)
        assert set(json.loads(choice["message"]["content"])) == {"city", "sunny"}
        assert choice["finish_reason"] == "stop"
        return
    response = served.post(
        "/v1/chat/completions", messages=ASK, max_tokens=200, response_format=wanted, stream=True
    )
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert set(json.loads(text)) == {"city", "sunny"}


def test_a_json_object_is_one(served: Served):
    choice = chat(served, response_format={"type": "json_object"}, temperature=0)
    text = choice["message"]["content"]
    assert text.startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"regex": "[0-9]{4}"}},
        {"guided_regex": "[0-9]{4}"},
        {"regex": "[0-9]{4}"},
        {"guided_choice": ["1234", "9999"]},
        {"structured_outputs": {"choice": ["1234"]}},
        {"guided_grammar": 'root ::= "12" "34"'},
        {"structured_outputs": {"grammar": 'start: "1234"'}},
    ],
)
def test_every_way_to_ask_for_four_digits(served: Served, body: dict):
    assert re.fullmatch("[0-9]{4}", chat(served, **body)["message"]["content"])
    answer = served.complete("The year is", max_tokens=20, **body)
    assert re.fullmatch("[0-9]{4}", answer["choices"][0]["text"])


@pytest.mark.parametrize(
    "grammar", [{"type": "json", "value": SCHEMA}, {"type": "regex", "value": "[ab]{3}"}]
)
def test_grammars_of_tgi(served: Served, grammar: dict):
    parameters = {"max_new_tokens": 100, "grammar": grammar}
    text = served.post("/generate", inputs="Say", parameters=parameters).json()["generated_text"]
    if grammar["type"] == "json":
        assert set(json.loads(text)) == {"city", "sunny"}
    else:
        assert re.fullmatch("[ab]{3}", text)


def test_a_required_call_is_made(served: Served):
    choice = chat(served, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] in ("get_weather", "get_time")
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None


def test_a_named_call_is_made(served: Served):
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = chat(served, tools=TOOLS, tool_choice=named)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert set(json.loads(call["function"]["arguments"])) == {"city", "sunny"}


def test_structured_answers_are_cached_prefixes_too(served: Served):
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    first = chat(served, response_format=wanted, temperature=0)
    again = chat(served, response_format=wanted, temperature=0)
    assert first["message"]["content"] == again["message"]["content"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_regex": "a", "tools": TOOLS, "tool_choice": "required"}, "guided_regex"),
        ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "guided_regex"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias"),
        ({"guided_grammar": "x" * 70_000}, "guided_grammar"),
    ],
)
def test_what_cant_be_followed_is_refused_by_name(served: Served, body: dict, param: str):
    response = served.post("/v1/chat/completions", messages=ASK, max_tokens=20, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_bias_and_bad_words_change_the_answer(served: Served):
    plain = served.complete("The river", max_tokens=6)["choices"][0]["text"]
    biased = served.complete("The river", max_tokens=6, logit_bias={"100": 100.0})["choices"][0]["text"]
    assert biased != plain
    word = plain.split()[0]
    assert word not in served.complete("The river", max_tokens=6, bad_words=[word])["choices"][0]["text"]
