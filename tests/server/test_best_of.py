from __future__ import annotations

import httpx
import pytest

from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.server.answers.logprobs import keep_best
from stemma.server.observe.collected import CollectedSequence
from tests.server.scripted_engine import ScriptedEngine


def sequence(text: str, *logprobs: float) -> CollectedSequence:
    return CollectedSequence([text], logprobs=[TokenLogprob(1, value) for value in logprobs])


def test_the_mean_counts_not_the_sum() -> None:
    candidates = [sequence("short", -1.0), sequence("long", -0.5, -0.5, -0.5), sequence("empty")]

    assert [kept.text for kept in keep_best(candidates, 2)] == ["long", "short"]
    assert keep_best(candidates, 3) == candidates


async def test_the_engine_makes_more_than_are_returned(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = {"model": "scripted", "prompt": "ab", "n": 2, "best_of": 5, "max_tokens": 3}
    answer = (await client.post("/v1/completions", json=body)).json()
    plain = await client.post("/generate", json={**body, "n": 1})

    assert [request.params.n for request in engine.requests] == [5, 5]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 15
    assert len(plain.json()["text"]) == 1


async def test_chat_and_tgi_answer_the_best_of_several(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "best_of": 3, "n": 2, "max_tokens": 3}
    answer = (await client.post("/v1/chat/completions", json=chat)).json()
    parameters = {"best_of": 2, "do_sample": True, "max_new_tokens": 3}
    tgi = await client.post("/generate", json={"inputs": "ab", "parameters": parameters})

    assert [request.params.n for request in engine.requests] == [3, 2]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert isinstance(tgi.json()["generated_text"], str)


@pytest.mark.parametrize("extra", [{"n": 3}, {"best_of": 1000}, {"stream": True}, {"temperature": 0}])
async def test_what_makes_no_sense_is_refused(client: httpx.AsyncClient, extra: dict[str, object]) -> None:
    body = {"model": "scripted", "prompt": "ab", "best_of": 2, **extra}
    response = await client.post("/v1/completions", json=body)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
