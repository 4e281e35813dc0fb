"""Every route that tenants have, taken from the application: with a meter, unread, at its largest.

A route that is new fails here until somebody says what the largest answer is that it can be asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stemma.server.app import ROUTERS
from tests.server.door.unread import (
    LONG_TOKENS,
    check_given_back,
    check_meter,
    metered_routes,
    tenant_routes,
    walk,
    walk_long_token,
)
from tests.server.scripted_engine import ScriptedEngine

ROUTES, METERED = tenant_routes(ROUTERS), metered_routes(ROUTERS)
FREE = {
    "facts of the server": """GET /version
        GET /v1/models
        GET /v1/models/{name:path}
        GET /info""",
    "an end, which gives back": """DELETE /v1/responses/{response_id}
        DELETE /v1/conversations/{conversation_id}""",
}
"""Routes that don't count as requests, and why."""

PROMPT, IDS = "hello world " * 100, [72, 101, 108] * 300
MESSAGES = [{"role": "user", "content": PROMPT}]
CHAT = {"model": "scripted", "messages": MESSAGES, "max_tokens": 50}
TGI = {"details": True, "decoder_input_details": True, "return_full_text": True, "max_new_tokens": 300}
STREAMED = {"details": True, "return_full_text": True, "max_new_tokens": 300}
RERANKED = {"query": "a", "documents": [f"{number}{PROMPT}" for number in range(60)]}
SCORED = {"text_1": "a", "text_2": [f"{number}{PROMPT}" for number in range(60)]}
LARGEST: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": [IDS] * 4, "echo": True, "max_tokens": 0, "n": 64, "return_token_ids": True},
        {"prompt": [PROMPT] * 4, "echo": True, "max_tokens": 0, "n": 64},
        {"prompt": "\x01" * 2000, "echo": True, "max_tokens": 0, "n": 128},
        {"prompt": "é" * 1500 + "🌍", "echo": True, "max_tokens": 1, "n": 128},
        {"prompt": IDS, "max_tokens": 1, "n": 64, "prompt_logprobs": 20},
        {"prompt": IDS, "max_tokens": 1, "n": 16, "echo": True, "logprobs": 20},
        {"prompt": "x", "max_tokens": 40, "n": 16, "logprobs": 20, "return_token_ids": True},
        {"prompt": IDS, "max_tokens": 1, "n": 16, "echo": True, "logprobs": 20, "stream": True},
        {
            "prompt": [IDS] * 4,
            "echo": True,
            "n": 64,
            "stream": True,
            "return_token_ids": True,
            "max_tokens": 1,
        },
    ],
    "/v1/chat/completions": [
        {**CHAT, "n": 8, "logprobs": True, "top_logprobs": 20, "return_token_ids": True},
        {**CHAT, "prompt_logprobs": 20, "n": 8},
        {**CHAT, "n": 64, "return_token_ids": True, "stream": True, "max_tokens": 2},
    ],
    "/v1/messages": [{**CHAT, "max_tokens": 500}, {**CHAT, "stream": True}],
    "/v1/messages/count_tokens": [{"model": "scripted", "messages": MESSAGES}],
    "/v1/responses": [
        {"model": "scripted", "input": PROMPT, "max_output_tokens": 500},
        {"model": "scripted", "input": PROMPT, "max_output_tokens": 50, "stream": True},
    ],
    "/v1/responses/input_tokens": [{"model": "scripted", "input": PROMPT}],
    "/v1/conversations": [{"items": [{"role": "user", "content": PROMPT * 50}]}],
    "/v1/conversations/{conversation_id}": [{"metadata": {"a": "b" * 500}}],
    "/v1/conversations/{conversation_id}/items": [{"items": [{"role": "user", "content": PROMPT * 50}]}],
    "/generate": [
        {"inputs": PROMPT, "parameters": TGI},
        {"prompt": PROMPT, "n": 128, "max_tokens": 1},
        {"inputs": "x", "parameters": {"best_of": 16, "do_sample": True, "max_new_tokens": 40}},
    ],
    "/generate_stream": [{"inputs": PROMPT, "parameters": STREAMED}],
    "/": [{"inputs": PROMPT, "parameters": TGI}, {"inputs": PROMPT, "parameters": STREAMED, "stream": True}],
    "/tokenize": [
        {"inputs": PROMPT * 50},
        {"prompt": PROMPT * 50, "return_token_strs": True},
        {"messages": MESSAGES, "return_token_strs": True},
    ],
    "/detokenize": [{"tokens": IDS * 50}],
    **{path: [RERANKED] for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    **{path: [SCORED] for path in ("/score", "/v1/score")},
    "/v1/embeddings": [
        {"model": "scripted", "input": [PROMPT] * 9},
        {"model": "scripted", "input": ["a"] * 50, "encoding_format": "base64"},
    ],
}
"""Bodies of POST by path: the most of each thing that an answer may repeat."""


def test_each_route_is_known_here() -> None:
    free = {tuple(one.split()) for lines in FREE.values() for one in lines.splitlines()}
    assert free | METERED == ROUTES
    assert free & METERED == set()
    assert {path for method, path in METERED if method == "POST"} == LARGEST.keys()


async def test_each_route_has_a_meter(engine: ScriptedEngine, tmp_path: Path) -> None:
    for number, (method, path) in enumerate(sorted(METERED)):
        folder = tmp_path / str(number)
        folder.mkdir()
        await check_meter(engine, folder, method, path, LARGEST[path][0] if method == "POST" else None)


CASES = [
    pytest.param(path, body, id=f"{path}-{number}")
    for path, bodies in LARGEST.items()
    for number, body in enumerate(bodies)
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("path", "body"), CASES)
async def test_an_unread_answer_holds_what_the_ledger_says(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    await walk(engine, tmp_path, monkeypatch, path, body)


TELLING_TEXT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "n": 4},
    "/v1/chat/completions": {**CHAT, "n": 4},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "scripted", "input": "x"},
    "/generate": {"inputs": "x"},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("token", LONG_TOKENS, ids=("long", "escaped"))
@pytest.mark.parametrize("path", TELLING_TEXT)
async def test_a_token_is_as_long_as_the_longest_of_the_vocabulary(
    tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, token: str
) -> None:
    await walk_long_token(tokenizer_path, tmp_path, monkeypatch, path, token, TELLING_TEXT[path])


@pytest.mark.parametrize("path", sorted(path for method, path in ROUTES if method == "GET"))
async def test_what_is_read_is_given_back(engine: ScriptedEngine, tmp_path: Path, path: str) -> None:
    await check_given_back(engine, tmp_path, path)
