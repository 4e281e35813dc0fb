"""Triton's ``/v2``: by hand, and with tritonclient."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from tests.server.scripted_engine import ScriptedEngine

MODEL = "/v2/models/scripted"


def tensor(ids: list[int], **more: Any) -> dict[str, Any]:
    return {"name": "input0", "shape": [1, len(ids)], "datatype": "UINT32", "data": ids, **more}


async def test_infer_takes_and_returns_token_ids(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    inputs = [tensor([65, 66, 67], parameters={"max_new_tokens": 5})]
    response = await client.post(
        f"{MODEL}/infer", json={"id": "a1", "inputs": inputs, "outputs": [{"name": "o"}]}
    )

    reply = engine.reply_ids(engine.requests[0], 0)
    assert len(reply) == 5
    assert response.json()["id"] == "a1"
    assert response.json()["outputs"] == [{"name": "o", "shape": [1, 5], "datatype": "UINT32", "data": reply}]
    assert response.headers["x-stemma-cached-tokens"] == "0"


async def test_generate(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    parameters = {"max_new_tokens": 5, "details": True, "batch_size": 1}
    body = {"id": "a1", "text_input": "ab", "parameters": parameters}
    answer = (await client.post(f"{MODEL}/generate", json=body)).json()

    assert answer["text_output"] == engine.tokenizer.decode(engine.reply_ids(engine.requests[0], 0))
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("a1", "scripted", None)
    assert answer["details"]["finish_reason"] == "length"
    assert answer["details"]["generated_tokens"] == 5
    assert answer["details"]["stemma"]["cached_tokens"] == 0
    assert answer["prefill_time"] >= 0
    assert answer["decode_time"] >= 0


async def test_generate_stream(client: httpx.AsyncClient) -> None:
    body = {"text_input": "ab", "parameters": {"max_new_tokens": 5, "details": True}}
    whole = (await client.post(f"{MODEL}/generate", json=body)).json()
    response = await client.post(f"{MODEL}/generate_stream", json=body)

    events = [orjson.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert "details" not in events[0]
    assert events[-1]["details"]["generated_tokens"] == 5
    assert response.headers["x-stemma-cached-tokens"] == "1"


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
async def test_stop_infer_ends_the_clients_own_requests(
    client: httpx.AsyncClient, engine: ScriptedEngine, path: str
) -> None:
    engine.script.delay_s = 0.02
    body = {"id": "mine", "text_input": "ab", "parameters": {"max_new_tokens": 400}}
    running = asyncio.create_task(client.post(f"{MODEL}/{path}", json=body))
    while not engine.active:
        await asyncio.sleep(0.01)
    for _ in range(200):
        stopped = await client.post(f"{MODEL}/stopInfer", json={"id": "mine"})
        if stopped.status_code == 200:
            break
        await asyncio.sleep(0.01)

    assert stopped.json() == {"id": "mine"}
    assert engine.aborted[0] == engine.requests[0].request_id
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await client.post(f"{MODEL}/stopInfer", json={"id": "mine"})).status_code == 404


async def test_metadata(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v2")).json()["name"] == "stemma"
    model = (await client.get(MODEL)).json()
    assert (model["name"], model["inputs"][0]["datatype"]) == ("scripted", "UINT32")
    assert (await client.get(f"{MODEL}/config")).json()["max_seq_len"] == 4096


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v2/models/other/generate", {"text_input": "a"}, 404, "Model other not found."),
        (f"{MODEL}/generate", {}, 422, "text_input"),
        (f"{MODEL}/generate", {"text_input": "a", "id": "a b"}, 422, "id"),
        (f"{MODEL}/infer", {"inputs": []}, 422, "inputs"),
        (f"{MODEL}/infer", {"inputs": [tensor([1]), tensor([1])]}, 422, "exactly one"),
        (f"{MODEL}/infer", {"inputs": [{**tensor([1]), "shape": [2, 1]}]}, 422, "doesn't fit"),
        (f"{MODEL}/infer", {"inputs": [{**tensor([1]), "datatype": "FP32"}]}, 422, "datatype"),
        (f"{MODEL}/infer", {"inputs": [tensor([2**31 - 1])]}, 422, "out of the vocabulary"),
        (f"{MODEL}/stopInfer", {"id": "nobody"}, 404, "no request with id"),
    ],
)
async def test_bad_input(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    response = await client.post(path, json=body)

    assert response.status_code == status
    assert message in response.json()["error"]


def test_tritonclient(live_url: str, engine: ScriptedEngine) -> None:
    triton = pytest.importorskip("tritonclient.http")
    with triton.InferenceServerClient(live_url.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("scripted")
        assert not client.is_model_ready("other")
        assert client.get_model_metadata("scripted")["name"] == "scripted"
        prompt = triton.InferInput("input0", [1, 2], "UINT32")
        prompt.set_data_from_numpy(np.array([[65, 66]], dtype=np.uint32), binary_data=False)
        result = client.infer("scripted", [prompt], parameters={"max_new_tokens": 4})
        assert result.as_numpy("output0").tolist() == [engine.reply_ids(engine.requests[0], 0)]

        expected = [engine.reply_ids(engine.requests[0], 0)]
        for datatype, dtype in (("UINT32", np.uint32), ("INT64", np.int64)):
            prompt = triton.InferInput("input0", [1, 2], datatype)
            prompt.set_data_from_numpy(np.array([[65, 66]], dtype=dtype), binary_data=True)
            result = client.infer("scripted", [prompt], parameters={"max_new_tokens": 4})
            assert result.as_numpy("output0").tolist() == expected
            for wants_binary in (True, False):
                output = triton.InferRequestedOutput("output0", binary_data=wants_binary)
                found = client.infer("scripted", [prompt], outputs=[output], parameters={"max_new_tokens": 4})
                assert found.as_numpy("output0").tolist() == expected
                assert ("data" in found.get_response()["outputs"][0]) is not wants_binary
        prompt.set_data_from_numpy(np.array([[-1, 66]], dtype=np.int64), binary_data=True)
        with pytest.raises(triton.InferenceServerException, match="greater than or equal to 0"):
            client.infer("scripted", [prompt])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("length", "size", "tail", "message"),
    [
        ("x", 8, bytes(8), "no length within the body"),
        ("9999999", 8, bytes(8), "no length within the body"),
        (None, 9, bytes(8), "no length within the body"),
        (None, -1, bytes(8), "no length within the body"),
        (None, True, bytes(8), "no length within the body"),
        (None, 7, bytes(7), "are no UINT32 values"),
        (None, 8, bytes(12), "4 bytes are left"),
        (None, 40_000, bytes(40_000), "or more than"),
        ("3", 8, bytes(8), "JSON"),
    ],
)
async def test_binary_tensors_that_do_not_fit(
    client: httpx.AsyncClient, length: str | None, size: Any, tail: bytes, message: str
) -> None:
    parameters = {"binary_data_size": size}
    given = {"name": "i", "shape": [1, 2], "datatype": "UINT32", "parameters": parameters}
    head = orjson.dumps({"inputs": [given]})
    headers = {"inference-header-content-length": str(len(head)) if length is None else length}
    headers["content-type"] = "application/json"
    response = await client.post(f"{MODEL}/infer", content=head + tail, headers=headers)
    assert response.status_code == 422
    assert message in response.json()["error"]
