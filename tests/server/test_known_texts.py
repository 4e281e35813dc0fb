"""Prompts that come again are tokenized once; who shares no prefix shares no text either."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.config.settings import Settings
from stemma.server.app import create_app
from stemma.server.requests.known_texts import MAX_CHARS, MIN_CHARS, KnownTexts, TextKey
from stemma.server.tenants.keyfile import add_key
from tests.server.scripted_engine import ScriptedEngine

TEXT = "Once upon a time " * 100


@pytest.fixture
def encoded(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What the tokenizer was asked for."""
    calls: list[tuple[str, bool]] = []
    encode = engine.tokenizer.encode

    def noted(text: str, *, add_special_tokens: bool = True):
        if text.startswith(TEXT):  # replies are made with it too
            calls.append((text, add_special_tokens))
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "encode", noted)
    return calls


async def _complete(client: httpx.AsyncClient, **body: object) -> None:
    response = await client.post("/v1/completions", json={"model": "scripted", "max_tokens": 2, **body})
    assert response.status_code == 200, response.text


async def test_a_text_is_tokenized_once(
    client: httpx.AsyncClient, engine: ScriptedEngine, encoded: list[tuple[str, bool]]
) -> None:
    await _complete(client, prompt=TEXT)
    await _complete(client, prompt=TEXT)
    await _complete(client, prompt=TEXT, truncate_prompt_tokens=7)
    await client.post("/generate", json={"inputs": TEXT, "parameters": {"max_new_tokens": 2}})
    assert encoded == [(TEXT, True)]
    given = [request.prompt_token_ids.tolist() for request in engine.requests]
    assert given[0] == given[1] == given[3] == list(engine.tokenizer.encode(TEXT))
    assert given[2] == given[0][-7:]


async def test_what_changes_ids_or_shares_no_prefix_is_another_text(
    client: httpx.AsyncClient, encoded: list[tuple[str, bool]]
) -> None:
    bodies = [{}, {"add_special_tokens": False}, {"cache_salt": "mine"}, {"cache_salt": "yours"}]
    for body in (*bodies, *bodies):
        await _complete(client, prompt=TEXT, **body)
    await _complete(client, prompt=f"{TEXT}.")
    assert encoded == [(TEXT, True), (TEXT, False), (TEXT, True), (TEXT, True), (f"{TEXT}.", True)]


@pytest.mark.parametrize("what", ["tenants", "cache"])
async def test_nothing_is_known_where_nothing_is_shared(
    engine: ScriptedEngine, settings: Settings, encoded: list[tuple[str, bool]], tmp_path: Path, what: str
) -> None:
    headers = {}
    if what == "tenants":
        keys = tmp_path / "keys.toml"
        headers = {"authorization": f"Bearer {add_key(keys, 'ada')}"}
        settings = settings.model_copy(
            update={"server": settings.server.model_copy(update={"api_keys_file": keys})}
        )
    else:
        cache = settings.engine.cache.model_copy(update={"enable_prefix_cache": False})
        settings = settings.model_copy(update={"engine": settings.engine.model_copy(update={"cache": cache})})
    app = create_app(engine, settings)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        await _complete(client, prompt=TEXT)
        await _complete(client, prompt=TEXT)
    assert encoded == [(TEXT, True), (TEXT, True)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.sampled_from(["", "a"]), st.booleans())))
def test_it_is_bounded_and_never_wrong(steps: list[tuple[bool, int, str, bool]]) -> None:
    """Whatever is added and asked for, in whatever order; what was added last is there."""
    room = 4 * (MIN_CHARS + 1000)
    known = KnownTexts(max_bytes=room)
    added: dict[TextKey, list[int]] = {}
    for is_added, length, salt, add_special_tokens in steps:
        key = TextKey(salt, add_special_tokens, "x" * (MIN_CHARS + length))
        if is_added:
            added.setdefault(key, [length, len(salt), add_special_tokens])
            known.add(key, np.array(added[key], dtype=np.int32))
            assert known.find(key) is not None
        found = known.find(key)
        assert found is None or found.tolist() == added[key]
        assert known.num_bytes <= room


def test_the_text_used_least_lately_goes_first() -> None:
    known = KnownTexts(max_bytes=2 * (MIN_CHARS + 900))
    keys = [TextKey("", True, letter * MIN_CHARS) for letter in "abc"]
    known.add(keys[0], np.arange(3, dtype=np.int32))
    known.add(keys[1], np.arange(3, dtype=np.int32))
    known.find(keys[0])
    known.add(keys[2], np.arange(3, dtype=np.int32))
    assert [known.find(key) is not None for key in keys] == [True, False, True]


@pytest.mark.parametrize("length", [MIN_CHARS - 1, MAX_CHARS + 1])
def test_texts_too_short_or_too_long_are_left_out(length: int) -> None:
    known = KnownTexts()
    known.add(TextKey("", True, "x" * length), np.arange(3, dtype=np.int32))
    assert known.num_bytes == 0
