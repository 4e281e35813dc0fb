"""What agents sent, again before the templates of model families: nothing is refused, prompts share much.

The engine is scripted; parsing, rendering and tokenizing are the server's. See docs/how-to/agents.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from stemma.config.server_settings import ServerSettings
from stemma.config.settings import EngineSettings, ModelSettings, Settings
from stemma.model.files.tiny import build_tokenizer
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.answers.families import answer_format
from stemma.server.app import create_app
from stemma.types import TokenArray
from tests.conformance.agents.agents import AGENTS
from tests.conformance.agents.recordings import (
    DIRECTORY,
    IDENTIFIER,
    MEDIA,
    POINTER,
    SCHEMA,
    Recording,
    read_all,
)
from tests.conformance.agents.tiny import CONTEXT, TEMPLATES
from tests.server.scripted_engine import Script, ScriptedEngine

FAMILIES = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
FORMATS = {
    "deepseek-v3.1": ("deepseek_v31", "think"),
    "gemma-4": ("gemma4", ""),
    "glm-4.5": ("glm", "think"),
    "gpt-oss": ("harmony", "harmony"),
    "kimi-k2": ("kimi_k2", ""),
    "llama-4": ("pythonic", ""),
    "minimax-m2": ("minimax_m2", "think"),
    "mistral": ("mistral_args", ""),
    "qwen3": ("hermes", "think"),
    "qwen3-coder": ("qwen3_coder", ""),
    "qwen3.5": ("qwen3_coder", "think"),
}
SLACK = 64
TOKENS_OF_ONE = 3
"""Tokens of this small vocabulary for one of a large one, at most."""
MOST_BYTES = 2_000_000


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = build_tokenizer()
    made.chat_template = (TEMPLATES / f"{request.param}.jinja").read_text()
    path = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(path)
    return Tokenizer(path)


def test_the_templates_are_known(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    """The server sees in what a template writes how calls are to be read."""
    family = request.node.callspec.params["tokenizer"]
    form = answer_format("auto", "auto", tokenizer)
    found = (form.tools.name if form.tools else "", form.thinking.name if form.thinking else "")
    assert found == FORMATS[family]


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return read_all()


async def prompts_of(recording: Recording, tokenizer: Tokenizer) -> list[tuple[int, TokenArray]]:
    """Send some of a recording's requests; return the prompts of the task with their session's number."""
    requests = chosen(recording.requests)
    engine = ScriptedEngine(tokenizer, max_model_len=CONTEXT, script=Script(reply="Fine."))
    model = ModelSettings(path=Path("scripted"))
    app = create_app(engine, Settings(engine=EngineSettings(model=model), server=ServerSettings(port=0)))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for request in requests:
            body = recording.body(request, engine.model_name)
            answer = await client.post(request["path"], json=body, headers=recording.headers(request))
            assert answer.status_code == 200, (recording.name, answer.text[:500])
    sent = zip(requests, engine.requests, strict=True)
    prompts = [(request["session"], made.prompt_token_ids) for request, made in sent]
    longest = max(len(prompt) for _, prompt in prompts)
    return [(session, prompt) for session, prompt in prompts if len(prompt) > longest / 2]


def chosen(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a session's first turns and its last one, and the beginning of the next session."""
    first, second = ([one for one in requests if one["session"] == session] for session in (0, 1))
    return [*first[:3], first[-1], *second[:2]]


def shared(left: TokenArray, right: TokenArray) -> int:
    """Return how many leading tokens two prompts share."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


@pytest.mark.one_in(3)
async def test_nothing_is_refused_and_prompts_share(
    tokenizer: Tokenizer, recordings: list[Recording]
) -> None:
    for recording in recordings:
        agent = AGENTS[recording.name]
        prompts = await prompts_of(recording, tokenizer)
        turns = [prompt for session, prompt in prompts if session == 0]
        again = [prompt for session, prompt in prompts if session == 1]
        for before, turn in pairwise(turns):
            lost = len(before) - shared(before, turn)
            assert lost <= TOKENS_OF_ONE * agent.num_moved + SLACK, (recording.name, lost, len(before))
        known = max(shared(turn, again[0]) for turn in turns)
        assert known >= agent.shared * len(again[0]), (recording.name, known, len(again[0]))


def strings(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, and all names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name.removeprefix("~")
            yield from strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)


def test_recordings_hold_no_text(recordings: list[Recording]) -> None:
    for recording in recordings:
        assert set(recording.raw) == {"agent", "version", "texts", "ids", "parts", "requests"}
        for request in recording.requests:
            betas = request["headers"].pop("anthropic-beta", "")
            media = [request["headers"].pop(name, "*/*") for name in ("accept", "content-type")]
            assert all(IDENTIFIER.fullmatch(beta) for beta in betas.split(",") if beta)
            assert all(one in MEDIA for medium in media for one in medium.split(", ")), media
            assert request["headers"].pop("anthropic-version", "2023-06-01") == "2023-06-01"
            assert request.pop("path") in ("/v1/messages", "/v1/responses", "/v1/chat/completions")
        held = {key: recording.raw[key] for key in ("texts", "ids", "parts", "requests")}
        odd = [
            one
            for one in strings(held)
            if one and one != SCHEMA and not IDENTIFIER.fullmatch(one) and not POINTER.fullmatch(one)
        ]
        assert odd == [], recording.name


def test_every_agent_is_recorded_as_it_is_installed(recordings: list[Recording]) -> None:
    assert {recording.name for recording in recordings} == set(AGENTS)
    directory = Path(__file__).parent
    wanted = json.loads((directory / "package.json").read_text())["dependencies"]
    wanted |= dict(line.split("==") for line in (directory / "aider.txt").read_text().splitlines())
    for recording in recordings:
        assert recording.raw["version"] == wanted[AGENTS[recording.name].package], recording.name
    assert sum(file.stat().st_size for file in DIRECTORY.iterdir()) < MOST_BYTES
