"""``/generate`` in TGI's and vLLM's shape; the dialogue is the one that MindIE's manual walks through."""

from __future__ import annotations

import httpx
import orjson
import pytest

from tests.server.scripted_engine import ScriptedEngine

QUESTION = "Question: Which situation should the aides report?\na) A girl reads.\nb) Boys argue.\nAnswer:"


async def test_only_inputs_is_needed(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    response = await client.post("/generate", json={"inputs": QUESTION})

    [request] = engine.requests
    assert response.json() == {"generated_text": engine.tokenizer.decode(engine.reply_ids(request, 0))}
    assert request.params.max_tokens == 20
    assert request.params.greedy


async def test_second_round_reuses_the_first(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"inputs": QUESTION, "parameters": {"max_new_tokens": 30}}
    first = await client.post("/generate", json=body)
    answer = first.json()["generated_text"]
    body["inputs"] = QUESTION + answer + "\nQuestion: And what if they deny it?\nAnswer:"
    second = await client.post("/generate", json=body)

    assert first.headers["x-stemma-cached-tokens"] == "0"
    assert second.headers["x-stemma-cached-tokens"] == str(len(engine.tokenizer.encode(QUESTION)))


async def test_details(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    parameters = {"max_new_tokens": 3, "details": True, "decoder_input_details": True}
    response = await client.post("/generate", json={"inputs": "ab", "parameters": parameters})

    details = response.json()["details"]
    reply = engine.reply_ids(engine.requests[0], 0)
    assert details["prompt_tokens"] == 2
    assert details["finish_reason"] == "length"
    assert details["generated_tokens"] == 3
    assert [token["text"] for token in details["prefill"]] == ["a", "b"]
    assert [(token["id"], token["logprob"]) for token in details["tokens"]] == [(i, -0.5) for i in reply]
    assert details["stemma"]["cached_tokens"] == 0


async def test_root_wraps_a_whole_answer_in_a_list(client: httpx.AsyncClient) -> None:
    whole = await client.post("/generate", json={"inputs": "ab"})
    root = await client.post("/", json={"inputs": "ab"})

    assert root.json() == [whole.json()]


@pytest.mark.parametrize(("url", "extra"), [("/generate_stream", {}), ("/", {"stream": True})])
async def test_stream(client: httpx.AsyncClient, url: str, extra: dict[str, bool]) -> None:
    body = {"inputs": "ab", "parameters": {"max_new_tokens": 12, "details": True}}
    whole = (await client.post("/generate", json=body)).json()
    response = await client.post(url, json={**body, **extra})

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-stemma-cached-tokens"] == "1"
    events = [orjson.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert "".join(item["token"]["text"] for item in events) == whole["generated_text"]
    assert [item["generated_text"] for item in events] == [None] * 11 + [whole["generated_text"]]
    assert [item["token"]["id"] for item in events] == [each["id"] for each in whole["details"]["tokens"]]
    assert [item["index"] for item in events] == list(range(1, 13))
    assert events[-1]["details"]["generated_tokens"] == 12


async def test_full_text_and_truncation(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    parameters = {"return_full_text": True, "truncate": 4, "max_new_tokens": 2}
    response = await client.post("/generate", json={"inputs": "abcdefgh", "parameters": parameters})

    assert response.json()["generated_text"].startswith("abcdefgh")
    assert engine.tokenizer.decode(engine.requests[0].prompt_token_ids.tolist()) == "efgh"


async def test_a_sampled_request_gets_a_seed_to_repeat_it(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    parameters = {"do_sample": True, "temperature": 0.7, "details": True}
    response = await client.post("/generate", json={"inputs": "ab", "parameters": parameters})

    assert response.json()["details"]["seed"] == engine.requests[0].params.seed is not None
    assert engine.requests[0].params.temperature == 0.7


async def test_no_sampling_wins_over_a_temperature(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    parameters = {"do_sample": False, "temperature": 0.7}
    await client.post("/generate", json={"inputs": "ab", "parameters": parameters})

    assert engine.requests[0].params.greedy


async def test_input_details_are_not_for_streams(client: httpx.AsyncClient) -> None:
    body = {"inputs": "ab", "parameters": {"decoder_input_details": True}}

    assert (await client.post("/generate_stream", json=body)).status_code == 422


async def test_vllm_shape(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"prompt": "ab", "n": 2, "max_tokens": 4}
    whole = (await client.post("/generate", json=body)).json()
    streamed = await client.post("/generate", json={**body, "stream": True})

    texts = [engine.tokenizer.decode(engine.reply_ids(engine.requests[0], index)) for index in (0, 1)]
    assert whole == {"text": ["ab" + text for text in texts]}
    pieces = [orjson.loads(piece)["text"] for piece in streamed.text.split("\0") if piece]
    assert ["".join(parts) for parts in zip(*pieces, strict=True)] == texts


async def test_engine_failure_in_mid_stream(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script.fail_after = 2
    response = await client.post("/generate_stream", json={"inputs": "ab"})

    events = [orjson.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert events[-1] == {"error": "step failed", "error_type": "Generation Error"}
