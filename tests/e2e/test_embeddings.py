"""Embeddings over HTTP: OpenAI's client, vLLM's fields, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from stemma.model.text.tokenizer import Tokenizer
from tests.e2e.conftest import Served, start_server
from tests.pooled_checkpoints import PROMPTS, build_embedding

TEXTS = ["A river runs through the valley. " * 6, "There are seven days in a week."]
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_embedding(tmp_path_factory.mktemp("model") / "embedder", matryoshka_dimensions=[8, 16])


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[Served]:
    found, stop = start_server(path, kv_cache_memory="4MB")
    yield found
    stop()


def embed(served: Served, given: Any, **fields: Any) -> dict[str, Any]:
    response = served.post(PATH, input=given, **fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["embedding"] for one in answer["data"]]


def test_the_official_client(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    found = client.embeddings.create(model="embedder", input=TEXTS)  # asks for base64, and decodes it
    plain = client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
    assert [len(one.embedding) for one in found.data] == [64, 64]
    assert [one.embedding for one in found.data] == [one.embedding for one in plain.data]
    assert found.usage.total_tokens == found.usage.prompt_tokens > 60
    cut = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=8)
    whole = np.array(found.data[0].embedding[:8])
    np.testing.assert_allclose(cut.data[0].embedding, whole / np.linalg.norm(whole), atol=1e-6)


def test_all_forms_of_an_input_give_the_same_bits(served: Served, path: Path) -> None:
    expected = vectors(embed(served, TEXTS))
    ids = [Tokenizer(path).encode(text).tolist() for text in TEXTS]
    assert vectors(embed(served, ids)) == expected
    for text, tokens, vector in zip(TEXTS, ids, expected, strict=True):
        assert vectors(embed(served, text)) == [vector]
        assert vectors(embed(served, tokens)) == [vector]
        coded = vectors(embed(served, text, encoding_format="base64"))
        assert np.frombuffer(base64.b64decode(str(coded[0])), "<f4").tolist() == vector


def test_usage_tells_what_was_cached(served: Served) -> None:
    given = "To compute the sum, add the first number to the second. " * 4
    first, again = embed(served, given, cache_salt="mine"), embed(served, given, cache_salt="mine")
    num_prompt = first["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": num_prompt - 1}
    assert (again["usage"]["total_tokens"], again["usage"]["completion_tokens"]) == (num_prompt, 0)
    assert vectors(first) == vectors(again)
    other = embed(served, given, cache_salt="another")
    assert other["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert (other["object"], other["model"], other["data"][0]["object"]) == ("list", "embedder", "embedding")


def test_prompts_and_cuts(served: Served, path: Path) -> None:
    assert vectors(embed(served, TEXTS, prompt_name="query")) == vectors(
        embed(served, [PROMPTS["query"] + text for text in TEXTS])
    )
    ids = Tokenizer(path).encode(TEXTS[0]).tolist()
    assert vectors(embed(served, TEXTS[0], truncate_prompt_tokens=5)) == vectors(embed(served, ids[-5:]))
    first = embed(served, TEXTS[0], truncate_prompt_tokens=5, truncation_side="right")
    assert vectors(first) == vectors(embed(served, ids[:5]))
    long = embed(served, "water " * 3000, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == served.engine.max_model_len - 1
    raw = vectors(embed(served, TEXTS[1], normalize=False))[0]
    assert abs(np.linalg.norm(raw) - 1) > 0.1
    plain = embed(served, TEXTS[1], add_special_tokens=False)
    assert plain["usage"]["prompt_tokens"] == embed(served, TEXTS[1])["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", ""),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": [5, "x"]}, "input", "must be a string"),
        ({"input": [True]}, "input", "must be a string"),
        ({"input": [-1]}, "input", "numbers from 0"),
        ({"input": [10**6]}, "prompt", "token ids must be in"),
        ({"input": {"text": "x"}}, "input", ""),
        ({"input": "water " * 4000}, "input", "too long"),
        ({"input": ["x"] * 1025}, "input", "more than 1024"),
        ({"input": "x", "dimensions": 9}, "dimensions", "one of 8, 16"),
        ({"input": "x", "dimensions": 0}, "dimensions", ""),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": "x", "prompt_name": "nothing"}, "prompt_name", "document, query"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ""),
        ({"input": "x", "messages": []}, "messages", "not supported"),
        ({"input": "x", "model": "another"}, "model", "does not exist"),
    ],
)
def test_what_is_refused(served: Served, body: dict[str, Any], param: str, message: str) -> None:
    response = served.post(PATH, **body)
    assert response.status_code == (404 if param == "model" else 400)
    error = response.json()["error"]
    assert param in str(error["param"])
    assert message in error["message"]


def test_an_embedding_model_answers_nothing(served: Served) -> None:
    for name, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        response = served.post(name, **body)
        assert response.status_code == 400
        assert "generates no text; it serves /v1/embeddings" in response.json()["error"]["message"]


def test_a_model_that_generates_embeds_nothing(shared_server: Served) -> None:
    response = shared_server.post(PATH, input="x")
    assert response.status_code == 400
    assert "--pooling" in response.json()["error"]["message"]


def test_metrics_count_them_as_an_api_of_their_own(served: Served) -> None:
    embed(served, TEXTS)
    text = httpx.get(f"{served.url}/metrics").text
    assert 'api="embeddings"' in text
