"""The vendors' words for the cache: what changed since an earlier request, prewarming, `kv_hints`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from stemma.config.settings import Settings
from stemma.server.app import create_app
from tests.server.scripted_engine import ScriptedEngine

TOOLS = [
    {"name": name, "description": f"{name}s something", "input_schema": {"type": "object"}}
    for name in ("read", "write", "grep")
]
BODY: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 4,
    "system": "You are brief.",
    "tools": TOOLS,
    "messages": [{"role": "user", "content": "a b c"}],
}


@pytest.fixture
def claude(live_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(api_key="none", base_url=live_url) as made:
        yield made


@pytest.fixture
def gpt(live_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="none", base_url=f"{live_url}/v1") as made:
        yield made


LATER = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "d"}]
CHANGES: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": [*BODY["messages"], *LATER]}, None),
    ({"system": "You are verbose."}, "system_changed"),
    ({"tools": TOOLS[::-1]}, "tools_changed"),
    ({"tools": TOOLS[:2]}, "tools_changed"),
    ({"messages": [{"role": "user", "content": "a b d"}, *LATER]}, "messages_changed"),
]


@pytest.mark.parametrize(("changed", "reason"), CHANGES)
def test_anthropics_sdk_reads_why_the_cache_was_missed(
    claude: anthropic.Anthropic, changed: dict[str, Any], reason: str | None
) -> None:
    first = claude.messages.create(**BODY, diagnostics={"previous_message_id": None})
    assert first.diagnostics is None
    second = claude.messages.create(**{**BODY, **changed}, diagnostics={"previous_message_id": first.id})
    if reason is None:
        assert second.diagnostics is None
        return
    assert second.diagnostics is not None
    told = second.diagnostics.cache_miss_reason
    assert told is not None
    assert told.type == reason
    assert told.cache_missed_input_tokens >= (0 if "tools" in changed else 1)  # the template writes a number


def test_a_stream_says_it_as_it_begins(claude: anthropic.Anthropic) -> None:
    asked = {**BODY, "diagnostics": {"previous_message_id": "msg_unknown"}}
    with claude.messages.stream(**asked) as stream:
        message = stream.get_final_message()
    assert message.diagnostics is not None
    assert message.diagnostics.cache_miss_reason is not None
    assert message.diagnostics.cache_miss_reason.type == "previous_message_not_found"


async def test_others_prompts_are_unknown(client: httpx.AsyncClient) -> None:
    first = (await client.post("/v1/messages", json={**BODY, "cache_salt": "mine"})).json()
    asked = {**BODY, "cache_salt": "yours", "diagnostics": {"previous_message_id": first["id"]}}
    told = (await client.post("/v1/messages", json=asked)).json()["diagnostics"]
    assert told == {"cache_miss_reason": {"type": "previous_message_not_found"}}


def test_openais_sdk_reads_the_diagnostics(gpt: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "scripted", "input": "a b c", "instructions": "Be brief."}
    first = gpt.responses.create(**asked)
    assert first.prompt_cache_diagnostics is None
    options: Any = {"comparison_response_id": first.id}
    same = gpt.responses.create(**asked, prompt_cache_options=options)
    assert same.prompt_cache_diagnostics is not None
    assert same.prompt_cache_diagnostics.type == "cache_hit"
    other = gpt.responses.create(**{**asked, "input": "z"}, prompt_cache_options=options)
    assert other.prompt_cache_diagnostics is not None
    assert other.prompt_cache_diagnostics.type == "cache_miss"
    assert other.prompt_cache_diagnostics.reason == "input_changed"
    assert other.prompt_cache_diagnostics.cache_missed_tokens > 0
    options = {"comparison_response_id": "resp_unknown"}
    unknown = gpt.responses.create(**asked, prompt_cache_options=options)
    assert unknown.prompt_cache_diagnostics is not None
    assert unknown.prompt_cache_diagnostics.type == "comparison_response_not_found"


def test_prewarming_answers_nothing(live_url: str, gpt: openai.OpenAI, engine: ScriptedEngine) -> None:
    options: Any = {"prewarm": True, "ttl": "12h"}
    answer = gpt.responses.create(model="scripted", input="a b c", prompt_cache_options=options)
    assert (answer.status, answer.output) == ("completed", [])
    assert answer.usage is not None
    assert answer.usage.output_tokens == 0
    [request] = engine.requests
    assert request.params.max_tokens == 1
    assert request.retention.rest.ttl_s == 12 * 3600
    message = httpx.post(f"{live_url}/v1/messages", json={**BODY, "max_tokens": 0}).json()
    assert (message["content"], message["usage"]["output_tokens"]) == ([], 0)
    chat = {"messages": BODY["messages"], "prompt_cache_options": {"prewarm": True}, "stream": True}
    told = httpx.post(f"{live_url}/v1/chat/completions", json=chat).text
    assert '"content":""' in told
    assert told.count('"content"') == 1


@pytest.mark.parametrize(
    ("field", "given", "ttl_s"),
    [
        ("prompt_cache_retention", "24h", 86400.0),
        ("prompt_cache_retention", "in_memory", None),
        ("prompt_cache_options", {"ttl": "30m"}, 1800.0),
    ],
)
async def test_retention_is_a_hint(
    client: httpx.AsyncClient, engine: ScriptedEngine, field: str, given: Any, ttl_s: float | None
) -> None:
    body = {"messages": BODY["messages"], "max_tokens": 2, field: given}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert engine.requests[-1].retention.rest.ttl_s == ttl_s
    wrong = await client.post("/v1/chat/completions", json={**body, field: {"ttl": "soon"}})
    assert wrong.status_code == 400


def hints(*actions: dict[str, Any], version: str = "0.1") -> dict[str, Any]:
    made = [
        {"action_id": f"a{number}", "action_version": "0.1", "payload": {}, **one}
        for number, one in enumerate(actions)
    ]
    return {"protocol_version": version, "message_id": "m1", "actions": made}


async def verdicts(client: httpx.AsyncClient, envelope: dict[str, Any]) -> list[tuple[str, str]]:
    body = {"messages": BODY["messages"], "max_tokens": 2, "kv_hints": envelope}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()["usage"]["stemma"]["kv_hints"]
    assert told["message_id"] == "m1"
    return [(one["verdict"], one.get("reason", "")) for one in told["actions"]]


async def test_each_action_has_a_verdict(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    told = await verdicts(
        client,
        hints(
            {"action_type": "retain", "payload": {"num_tokens": 3, "priority": 90, "ttl_s": 60}},
            {"action_type": "retain", "payload": {"num_tokens": 10_000}},
            {"action_type": "retain", "payload": {"num_tokens": "all"}},
            {"action_type": "demote"},
            {"action_type": "release", "action_version": "7"},
        ),
    )
    assert [verdict for verdict, _ in told] == ["done", "clipped", "refused", "refused", "refused"]
    assert all(reason for verdict, reason in told if verdict != "done")
    retention = engine.requests[-1].retention
    assert retention.renews
    assert retention.ranges[0].num_tokens == 3
    assert retention.ranges[0].hint.priority == 90
    assert retention.ranges[-1].num_tokens == len(engine.requests[-1].prompt_token_ids)


async def test_what_is_released_goes_first_and_what_is_kept_stays(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    await verdicts(
        client,
        hints(
            {"action_type": "retain", "payload": {"num_tokens": 4}},
            {"action_type": "release", "payload": {"from_token": 2}},
        ),
    )
    retention = engine.requests[-1].retention
    assert [(one.num_tokens, one.hint.priority > 0) for one in retention.ranges[:2]] == [(2, True), (4, True)]
    assert retention.ranges[-1].hint.priority == 0
    assert (retention.rest.priority, retention.rest.ttl_s) == (0, 0.0)


async def test_an_envelope_of_another_version_is_refused(client: httpx.AsyncClient) -> None:
    body = {"messages": BODY["messages"], "kv_hints": hints(version="9")}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "kv_hints.protocol_version" in answer.text


async def test_explanations_say_which_part_changed(engine: ScriptedEngine, settings: Settings) -> None:
    transport = httpx.ASGITransport(app=create_app(engine, settings), client=("127.0.0.1", 9))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        engine.script.miss_reason = "diverged"
        await client.post("/v1/messages", json=BODY)
        second = (await client.post("/v1/messages", json={**BODY, "tools": TOOLS[::-1]})).json()
        told = (await client.get("/admin/explain", params={"request": second["id"]})).json()["changed"]
        assert told["part"] == "tools reordered"
        third = (await client.post("/v1/messages", json={**BODY, "tools": TOOLS[:2]})).json()
        told = (await client.get("/admin/explain", params={"request": third["id"]})).json()["changed"]
        assert (told["part"], told["detail"]) == ("tools", "-grep")
