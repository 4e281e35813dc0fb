"""A stream speaks at once: headers before its first token, and comments while there is nothing else."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from stemma.config.settings import Settings
from tests.server.scripted_engine import ScriptedEngine

CHAT = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 2}
TGI = {"inputs": "a b c", "parameters": {"max_new_tokens": 2}}
PLANES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"prompt": "a b c", "max_tokens": 2, "stream": True}),
    ("/v1/responses", {"input": "a b c", "max_output_tokens": 2, "stream": True}),
    ("/v1/messages", {**CHAT, "stream": True}),
    ("/generate_stream", TGI),
    ("/", {**TGI, "stream": True}),
)
FIRST_TEXT = ('"delta":{', '"text_completion"', "output_text.delta", '"token"')
FIRST_TOKEN_S = 0.6


@pytest.fixture
def settings(settings: Settings) -> Settings:
    server = settings.server.model_copy(update={"stream_comment_s": 0.05})
    return settings.model_copy(update={"server": server})


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("path", "body"), PLANES)
def test_headers_and_comments_come_before_the_first_token(
    live_url: str, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    engine.script.gate = threading.Event()
    with httpx.stream("POST", live_url + path, json=body) as response:
        assert response.status_code == 200
        lines = []
        for line in response.iter_lines():
            lines.append(line)
            if sum(one.startswith(":") for one in lines) == 2:
                engine.script.gate.set()
    first = next(number for number, line in enumerate(lines) if any(mark in line for mark in FIRST_TEXT))
    comments = [line for line in lines[:first] if line.startswith(":")]
    assert len(comments) >= 2
    assert comments[0].startswith(": prompt processed=0 total=")
    assert not any(line.startswith(":") and "data" in line for line in lines)


def test_other_shapes_have_no_comments(live_url: str, engine: ScriptedEngine) -> None:
    engine.script.delay_s = FIRST_TOKEN_S
    answer = httpx.post(f"{live_url}/generate", json={"prompt": "a b", "max_tokens": 2, "stream": True})
    pieces = [json.loads(piece) for piece in answer.content.split(b"\0") if piece]
    assert all("text" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a b c", "max_tokens": 2})],
)
def test_progress_is_told_where_it_is_asked_for(
    live_url: str, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr("stemma.server.turn.outputs.PROGRESS_EVERY_S", 0.05)
    engine.script.delay_s = FIRST_TOKEN_S
    asked = {**body, "stream": True, "return_progress": True}
    with httpx.stream("POST", live_url + path, json=asked) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    told = [one["prompt_progress"] for one in events if "prompt_progress" in one]
    assert len(told) >= 2
    assert all(0 <= one["cache"] <= one["processed"] <= one["total"] for one in told)
    assert told[0]["total"] > 0
    assert "prompt_progress" not in events[-1]


def test_what_refuses_a_request_sets_the_status(live_url: str, engine: ScriptedEngine) -> None:
    engine.script.overloaded = True
    path, body = PLANES[0]
    assert httpx.post(live_url + path, json=body).status_code == 503


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("path", "body"), PLANES[:4])
def test_an_error_behind_the_headers_is_an_event(
    live_url: str, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    engine.script.delay_s, engine.script.fail_after = FIRST_TOKEN_S, 0
    response = httpx.post(live_url + path, json=body)
    assert response.status_code == 200
    assert '"error"' in response.text
