"""tritonclient over HTTP: infer on token ids, with errors as it reads them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

triton = pytest.importorskip("tritonclient.http")

import numpy as np  # noqa: E402


def test_infer(url: str) -> None:
    asked: Any = {"model": "tiny", "prompt": "The river", "max_tokens": 8, "temperature": 0}
    expected = httpx.post(f"{url}/v1/completions", json=asked).json()["choices"][0]["text"]
    ids = httpx.post(f"{url}/tokenize", json={"prompt": "The river"}).json()["tokens"]
    tensor = triton.InferInput("input0", [1, len(ids)], "UINT32")
    tensor.set_data_from_numpy(np.array([ids], dtype=np.uint32), binary_data=False)
    output = triton.InferRequestedOutput("output0", binary_data=False)
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        assert client.is_server_ready()
        assert client.is_model_ready("tiny")
        assert client.get_model_metadata("tiny")["inputs"][0]["datatype"] == "UINT32"
        result = client.infer("tiny", [tensor], outputs=[output], parameters={"max_new_tokens": 8})
        with pytest.raises(Exception, match="other"):
            client.infer("other", [tensor], outputs=[output])
        tensor.set_data_from_numpy(np.array([ids], dtype=np.uint32))
        binary = client.infer("tiny", [tensor], parameters={"max_new_tokens": 8})
        assert binary.as_numpy("output0").tolist() == result.as_numpy("output0").tolist()
    answer = result.as_numpy("output0")[0].tolist()
    assert httpx.post(f"{url}/detokenize", json={"tokens": answer}).json()["prompt"] == expected
