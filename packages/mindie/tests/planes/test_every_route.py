"""Every route of these planes that tenants have: with a meter, unread, at its largest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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

from stemma_mindie.planes.registered import API

ROUTES, METERED = tenant_routes(API.routers), metered_routes(API.routers)
FREE = {
    ("GET", "/v1/config"),
    ("GET", "/v2"),
    ("GET", "/v2/models/{model}"),
    ("GET", "/v2/models/{model}/config"),
    ("GET", "/v1/engine-server/running-status"),
    ("POST", "/v2/models/{model}/stopInfer"),
}
"""Routes that don't count as requests: facts of the server, and an end, which gives back."""

PROMPT, IDS = "hello world " * 100, [72, 101, 108] * 300
TENSOR = {"name": "in", "shape": [1, 900], "datatype": "UINT32", "data": IDS}
DETAILED = {"details": True, "max_new_tokens": 300}
LARGEST: dict[str, dict[str, Any]] = {
    "/infer": {"input_id": IDS, "parameters": DETAILED},
    "/infer_token": {"input_id": IDS, "stream": True, "parameters": DETAILED},
    "/v2/models/{model}/infer": {
        "inputs": [TENSOR],
        "outputs": [{"name": f"{number}"} for number in range(8)],
        "parameters": {"max_new_tokens": 500},
    },
    "/v2/models/{model}/generate": {"text_input": PROMPT, "parameters": {"max_new_tokens": 500}},
    "/v2/models/{model}/generate_stream": {"text_input": PROMPT, "parameters": {"max_new_tokens": 300}},
    "/v1/tokenizer": {"inputs": PROMPT * 50},
}
"""Bodies of POST by path: the most of each thing that an answer may repeat."""
TELLING_TEXT: dict[str, dict[str, Any]] = {
    "/infer": {"inputs": "x"},
    "/v2/models/{model}/generate": {"text_input": "x"},
}


def test_each_route_is_known_here() -> None:
    assert FREE | METERED == ROUTES
    assert set() == FREE & METERED
    assert {path for _, path in METERED} == LARGEST.keys()


@pytest.mark.parametrize(("method", "path"), sorted(METERED))
async def test_each_route_has_a_meter(engine: ScriptedEngine, tmp_path: Path, method: str, path: str) -> None:
    await check_meter(engine, tmp_path, method, path, LARGEST[path])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("path", LARGEST)
async def test_an_unread_answer_holds_what_the_ledger_says(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    await walk(engine, tmp_path, monkeypatch, path, LARGEST[path])


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
