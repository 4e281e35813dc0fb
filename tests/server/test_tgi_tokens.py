"""Events of a stream: one token each with an int."""

from __future__ import annotations

import pytest
from huggingface_hub import InferenceClient

from stemma.config.settings import Settings
from stemma.engine.api import SequenceDelta
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.server.apis.tgi_tokens import stream_tokens
from stemma.server.app import create_app
from stemma.server.turn.context import ApiContext
from tests.server.scripted_engine import ScriptedEngine


@pytest.fixture
def context(engine: ScriptedEngine, settings: Settings) -> ApiContext:
    made: ApiContext = create_app(engine, settings).state.api
    return made


def delta_of(engine: ScriptedEngine, ids: list[int], text: str) -> SequenceDelta:
    return SequenceDelta(0, tuple(ids), text, tuple(TokenLogprob(each, -0.5) for each in ids))


def test_a_draft_of_several_tokens_becomes_several_events(
    context: ApiContext, engine: ScriptedEngine
) -> None:
    ids = engine.tokenizer.encode("leaf").tolist()
    tokens = stream_tokens(context, delta_of(engine, ids, "leaf"))

    assert [token["id"] for token in tokens] == ids
    assert [token["text"] for token in tokens] == list("leaf")
    assert {(token["logprob"], token["special"]) for token in tokens} == {(-0.5, False)}


def test_text_that_tokens_share_comes_with_the_last(context: ApiContext, engine: ScriptedEngine) -> None:
    ids = engine.tokenizer.encode("日").tolist()
    tokens = stream_tokens(context, delta_of(engine, ids, "日"))

    assert [token["text"] for token in tokens] == ["", "", "日"]


def test_news_without_a_token(context: ApiContext) -> None:
    assert stream_tokens(context, SequenceDelta(0, (), "x")) == [
        {"id": 0, "text": "x", "logprob": None, "special": True}
    ]


def test_huggingface_hub_reads_streams_with_and_without_details(live_url: str) -> None:
    client = InferenceClient(live_url)
    whole = client.text_generation("ab", max_new_tokens=5, details=True)
    events = list(client.text_generation("ab", max_new_tokens=5, details=True, stream=True))

    assert whole.details is not None
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    assert events[-1].generated_text == whole.generated_text
    last = events[-1].details
    assert last is not None
    assert last.generated_tokens == 5
    assert "".join(client.text_generation("ab", max_new_tokens=5, stream=True)) == whole.generated_text
