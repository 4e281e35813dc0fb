"""Triton's client: token ids in, token ids out, as MindIE serves it.

pip install 'tritonclient[http]'; python packages/mindie/examples/triton_client.py http://127.0.0.1:8000
"""

import sys

import httpx
import numpy as np
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput


def main(url: str) -> None:
    """Tokenize, infer, and turn the ids back into text."""
    ids = httpx.post(f"{url}/tokenize", json={"prompt": "The river"}).json()["tokens"]
    with InferenceServerClient(url.removeprefix("http://")) as client:
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        print("ready:", client.is_server_live() and client.is_model_ready(model))
        prompt = InferInput("input0", [1, len(ids)], "UINT32")
        prompt.set_data_from_numpy(np.array([ids], dtype=np.uint32), binary_data=False)
        result = client.infer(
            model,
            [prompt],
            outputs=[InferRequestedOutput("output0", binary_data=False)],
            parameters={"max_new_tokens": 24},
        )
    answer = result.as_numpy("output0")[0].tolist()
    print("answer:", httpx.post(f"{url}/detokenize", json={"tokens": answer}).json()["prompt"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
