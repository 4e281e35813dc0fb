"""Log-probabilities of prompts, and token ids, in the shapes of OpenAI and vLLM."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.openai_requests import complete, stream
from tests.server.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"


async def test_vllm_prompt_logprobs_of_a_completion(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=[72, 101, 73], prompt_logprobs=1, max_tokens=2)
    first, second, third = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["101"]["logprob"] == pytest.approx(-0.1)
    assert (second["101"]["rank"], list(second)) == (2, ["101", "102"])
    assert third["74"] | {"decoded_token": ""} == {"logprob": -1.0, "rank": 1, "decoded_token": ""}
    assert answer["usage"]["completion_tokens"] == 2


async def test_vllm_prompt_logprobs_of_a_chat(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "prompt_logprobs": 0,
        "max_tokens": 2,
    }
    answer = (await client.post(CHAT, json=body)).json()
    num_prompt = len(engine.requests[-1].prompt_token_ids)
    assert len(answer["prompt_logprobs"]) == num_prompt
    assert answer["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_echo_with_logprobs(client: httpx.AsyncClient, max_tokens: int) -> None:
    body: dict[str, Any] = {
        "prompt": [[72, 101, 73], [72]],
        "echo": True,
        "logprobs": 2,
        "max_tokens": max_tokens,
    }
    answer = await complete(client, **body)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 3 + max_tokens
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:3] == pytest.approx([-0.1, -0.2])
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["top_logprobs"][2]) == 2
    offsets = logprobs["text_offset"]
    assert offsets == [sum(map(len, logprobs["tokens"][:n])) for n in range(3 + max_tokens)]
    assert len(answer["choices"][1]["logprobs"]["tokens"]) == 1 + max_tokens
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens


async def test_a_streamed_echo_brings_its_logprobs_once(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {
        "prompt": [[72, 101, 73], [72, 73]],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 2,
        "n": 2,
    }
    chunks = await stream(client, **body)
    whole = await complete(client, **body)
    for choice in whole["choices"]:
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [one for piece in pieces if piece["logprobs"] for one in piece["logprobs"][name]]
            assert joined == choice["logprobs"][name]


async def test_token_ids_of_completions(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body: dict[str, Any] = {"prompt": [[72, 101], [73]], "max_tokens": 3, "n": 2, "return_token_ids": True}
    whole = await complete(client, **body)
    chunks = await stream(client, **body)
    for choice in whole["choices"]:
        request = engine.requests[choice["index"] // 2]
        assert choice["prompt_token_ids"] == request.prompt_token_ids.tolist()
        assert choice["token_ids"] == engine.reply_ids(request, choice["index"] % 2)
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [p["prompt_token_ids"] for p in pieces if "prompt_token_ids" in p] == [
            choice["prompt_token_ids"]
        ]
        assert [i for piece in pieces for i in piece["token_ids"]] == choice["token_ids"]
    plain = await complete(client, prompt="x")
    assert "token_ids" not in plain["choices"][0]


async def test_token_ids_of_chats(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "return_token_ids": True,
        "max_tokens": 4,
    }
    answer = (await client.post(CHAT, json=body)).json()
    request = engine.requests[-1]
    assert answer["prompt_token_ids"] == request.prompt_token_ids.tolist()
    assert answer["choices"][0]["token_ids"] == engine.reply_ids(request, 0)
    chunks = await stream(client, CHAT, **body)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    ids = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", ())]
    assert ids == answer["choices"][0]["token_ids"]


async def test_tgi_prefill_has_logprobs(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    parameters = {"decoder_input_details": True, "max_new_tokens": 1}
    answer = (await client.post("/generate", json={"inputs": "Hey", "parameters": parameters})).json()
    assert [token["logprob"] for token in answer["details"]["prefill"]] == [
        None,
        pytest.approx(-0.1),
        pytest.approx(-0.2),
    ]
