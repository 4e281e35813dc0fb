"""Beginnings that texts have in common are tokenized once; who shares no prefix shares no text either."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.config.settings import Settings
from stemma.model.text.text_cuts import PIECE_CHARS
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.app import create_app
from stemma.server.door.keyfile import add_key
from stemma.server.turn.intake import MOST_CHARS
from stemma.server.turn.known_texts import MAX_CHARS, MIN_CHARS, KnownTexts
from stemma.types import TokenArray
from tests.server.scripted_engine import ScriptedEngine

TEXT = " ".join(f"once upon a time, number {number}" for number in range(100))


@pytest.fixture
def tokenized(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the tokenizer was asked for, pieces of a call joined."""
    calls: list[str] = []
    encode, encode_pieces = engine.tokenizer.encode, engine.tokenizer.encode_pieces

    def noted(text: str, *, add_special_tokens: bool = True) -> TokenArray:
        if "upon" in text:  # replies are made with it too
            calls.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    def noted_pieces(pieces: list[str]) -> list[TokenArray]:
        calls.append("".join(pieces))
        return encode_pieces(pieces)

    monkeypatch.setattr(engine.tokenizer, "encode", noted)
    monkeypatch.setattr(engine.tokenizer, "encode_pieces", noted_pieces)
    return calls


@pytest.fixture
def uncut(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows where texts of this tokenizer may be cut."""
    monkeypatch.setattr(engine.tokenizer, "cuts", None)


async def _complete(client: httpx.AsyncClient, **body: object) -> None:
    response = await client.post("/v1/completions", json={"model": "scripted", "max_tokens": 2, **body})
    assert response.status_code == 200, response.text


def _given(engine: ScriptedEngine) -> list[list[int]]:
    return [request.prompt_token_ids.tolist() for request in engine.requests]


async def test_a_text_is_tokenized_once(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenized: list[str]
) -> None:
    await _complete(client, prompt=TEXT)
    await _complete(client, prompt=TEXT, add_special_tokens=False)
    await _complete(client, prompt=TEXT, truncate_prompt_tokens=7)
    await client.post("/generate", json={"inputs": TEXT, "parameters": {"max_new_tokens": 2}})
    assert tokenized == [TEXT]
    first, *others = _given(engine)
    assert first == others[0] == others[2] == engine.tokenizer.encode(TEXT).tolist()
    assert others[1] == first[-7:]


async def test_a_text_that_goes_on_is_tokenized_from_its_last_pieces_on(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenized: list[str]
) -> None:
    await _complete(client, prompt=TEXT)
    longer = f"{TEXT} and then one more"
    await _complete(client, prompt=longer)
    assert tokenized[0] == TEXT
    assert longer.endswith(tokenized[1])
    assert len(tokenized[1]) < 2 * PIECE_CHARS
    assert _given(engine)[1] == engine.tokenizer.encode(longer).tolist()


async def test_a_chat_is_tokenized_from_its_last_turn_on(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenized: list[str]
) -> None:
    messages = [{"role": "user", "content": TEXT}]
    for _ in range(2):
        body = {"model": "scripted", "max_tokens": 2, "messages": messages}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        messages.append({"role": "assistant", "content": "and so on"})
        messages.append({"role": "user", "content": "Go on upon it!"})
    assert TEXT in tokenized[0]
    assert "Go on upon it!" in tokenized[1]
    assert len(tokenized[1]) < 2 * PIECE_CHARS
    for ids, length in zip(_given(engine), (1, 3), strict=True):
        assert ids == engine.tokenizer.apply_chat_template(messages[:length]).tolist()


@pytest.mark.usefixtures("uncut")
async def test_without_cuts_whole_texts_are_known(
    client: httpx.AsyncClient, engine: ScriptedEngine, tokenized: list[str]
) -> None:
    bodies = [{}, {"add_special_tokens": False}]
    for body in (*bodies, *bodies):
        await _complete(client, prompt=TEXT, **body)
    await _complete(client, prompt=f"{TEXT}.")
    assert tokenized == [TEXT, TEXT, f"{TEXT}."]
    assert _given(engine)[0] == engine.tokenizer.encode(TEXT).tolist()


async def test_what_shares_no_prefix_shares_no_text(client: httpx.AsyncClient, tokenized: list[str]) -> None:
    chat = {"model": "scripted", "max_tokens": 2, "messages": [{"role": "user", "content": TEXT}]}
    for salt in ("mine", "yours", "mine"):
        await _complete(client, prompt=TEXT, cache_salt=salt)
    assert tokenized == [TEXT, TEXT]
    for salt in ("mine", "yours", "mine"):
        await client.post("/v1/chat/completions", json={**chat, "cache_salt": salt})
    assert len(tokenized) == 4


async def test_what_is_only_tokenized_becomes_known_to_nobody(
    client: httpx.AsyncClient, tokenized: list[str]
) -> None:
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    for body in ({"prompt": TEXT}, chat, {"prompt": TEXT}, chat):
        assert (await client.post("/tokenize", json=body)).status_code == 200
    assert len(tokenized) == 4


@pytest.mark.parametrize("what", ["tenants", "cache"])
async def test_nothing_is_known_where_nothing_is_shared(
    engine: ScriptedEngine, settings: Settings, tokenized: list[str], tmp_path: Path, what: str
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
    assert tokenized == [TEXT, TEXT]


@cache
def with_cuts(path: Path) -> Tokenizer:
    return Tokenizer(path)


@cache
def without_cuts(path: Path) -> Tokenizer:
    tokenizer = Tokenizer(path)
    tokenizer.cuts = None
    return tokenizer


SALTED_TEXTS = st.tuples(
    st.sampled_from(["", "a"]),
    st.booleans(),
    st.lists(st.sampled_from(["some words ", "1234 ", "nobr", "，"]), max_size=400).map("".join),
)


@given(texts=st.lists(SALTED_TEXTS, max_size=8), cuts=st.booleans(), most=st.integers(0, 2000))
def test_it_is_bounded_and_never_wrong(
    tokenizer_path: Path, texts: list[tuple[str, bool, str]], cuts: bool, most: int
) -> None:
    """Whatever comes in whatever order; what came last is found."""
    tokenizer = with_cuts(tokenizer_path) if cuts else without_cuts(tokenizer_path)
    room = 20_000
    known = KnownTexts(max_bytes=room)
    for salt, special, text in texts:
        expected = tokenizer.encode(text, add_special_tokens=special).tolist()
        found = known.find(tokenizer, text, salt, add_special_tokens=special, most_new_chars=most)
        assert found is None or found.tolist() == expected
        assert (found is not None) >= (len(text) <= most)
        ids = known.encode(tokenizer, text, salt, add_special_tokens=special)
        assert ids.tolist() == expected
        assert known.num_bytes <= room
        if len(text) > MIN_CHARS and 12 * len(text) < room:
            assert known.find(tokenizer, text, salt, add_special_tokens=special) is not None


def test_threads_may_ask_at_once(tokenizer: Tokenizer) -> None:
    known = KnownTexts(max_bytes=30_000)
    texts = [f"text {number % 7} " * 300 for number in range(200)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda text: known.encode(tokenizer, text, "").tolist(), texts))
    assert found == [tokenizer.encode(text).tolist() for text in texts]
    assert known.num_bytes <= 30_000


def test_the_text_used_least_lately_goes_first(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "cuts", None)
    known = KnownTexts(max_bytes=2 * (5 * MIN_CHARS + 900))
    texts = [letter * MIN_CHARS for letter in "abc"]
    for text in (*texts[:2], texts[0], texts[2]):
        known.encode(tokenizer, text, "")
    assert [known.find(tokenizer, text, "") is not None for text in texts] == [True, False, True]


@pytest.mark.parametrize("length", [MIN_CHARS - 1, MAX_CHARS + 1])
def test_texts_too_short_or_too_long_are_left_out(tokenizer: Tokenizer, length: int) -> None:
    known = KnownTexts()
    known.encode(tokenizer, "x" * length, "")
    assert known.num_bytes == 0


async def test_long_texts_are_tokenized_off_the_event_loop(
    engine: ScriptedEngine, client: httpx.AsyncClient, tokenized: list[str]
) -> None:
    engine.max_model_len = 2 * MOST_CHARS
    text = "a long text, " * (MOST_CHARS // 13 + 1)
    for _ in range(2):
        await _complete(client, prompt=text)
    assert tokenized == [text]
