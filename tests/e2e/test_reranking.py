"""Reranking and scores over HTTP, as Jina's and vLLM's clients ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stemma import LLM
from tests.e2e.conftest import Served, start_server
from tests.pooled_checkpoints import build_embedding, build_reranker

QUERY = "How many days has a week?"
DOCUMENTS = ["There are seven days in a week.", "He bought three apples.", "The oldest goes first.", "Water."]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_reranker(tmp_path_factory.mktemp("model") / "reranker")


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[Served]:
    found, stop = start_server(path, kv_cache_memory="8MB")
    yield found
    stop()


@pytest.fixture(scope="module")
def expected(path: Path) -> list[float]:
    llm = LLM(path, kv_cache_memory="4MB", enable_prefix_cache=False, num_threads=1)
    return [llm.score(QUERY, document)[0].score for document in DOCUMENTS]


def post(served: Served, path: str, **body: Any) -> dict[str, Any]:
    response = served.post(path, **body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("route", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_the_best_come_first(served: Served, expected: list[float], route: str) -> None:
    answer = post(served, route, model="reranker", query=QUERY, documents=DOCUMENTS)
    order = sorted(range(4), key=lambda index: -expected[index])
    assert [one["index"] for one in answer["results"]] == order
    assert [one["relevance_score"] for one in answer["results"]] == [expected[index] for index in order]
    assert [one["document"] for one in answer["results"]] == [{"text": DOCUMENTS[i]} for i in order]
    assert answer["model"] == "reranker"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]


def test_forms_of_documents_and_results(served: Served, expected: list[float]) -> None:
    body: dict[str, Any] = {"query": QUERY, "documents": [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]}
    best = post(served, "/rerank", **body, top_n=2, return_documents=False)["results"]
    assert [set(one) for one in best] == [{"index", "relevance_score"}] * 2
    assert best[0]["relevance_score"] == max(expected)
    assert len(post(served, "/rerank", **body, top_n=0)["results"]) == 4
    assert len(post(served, "/rerank", **body, top_n=9)["results"]) == 4


def test_instruction_and_query_are_computed_once(served: Served, expected: list[float]) -> None:
    asked: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS, "cache_salt": "alone"}
    first = post(served, "/rerank", **asked)["usage"]
    single = post(served, "/rerank", query=QUERY, documents=DOCUMENTS[:1], cache_salt="other")["usage"]
    shared = first["prompt_tokens_details"]["cached_tokens"] / 3
    assert shared > 0.7 * single["prompt_tokens"]
    again = post(served, "/rerank", **asked)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 4
    assert {one["index"]: one["relevance_score"] for one in again["results"]} == dict(enumerate(expected))


@pytest.mark.parametrize("route", ["/score", "/v1/score"])
def test_scores(served: Served, expected: list[float], route: str) -> None:
    answer = post(served, route, text_1=QUERY, text_2=DOCUMENTS)
    assert answer["data"] == [
        {"index": index, "object": "score", "score": one} for index, one in enumerate(expected)
    ]
    assert answer["object"] == "list"
    pairs = post(served, route, text_1=[QUERY] * 4, text_2=DOCUMENTS)
    assert pairs["data"] == answer["data"]
    assert post(served, route, text_1=QUERY, text_2=DOCUMENTS[0])["data"] == answer["data"][:1]


def test_a_model_that_reranks_also_answers(served: Served) -> None:
    assert post(served, "/v1/completions", prompt="A river", max_tokens=2)["choices"]


@pytest.mark.parametrize(
    ("route", "body", "param", "message"),
    [
        ("/rerank", {"documents": ["x"]}, "query", ""),
        ("/rerank", {"query": "", "documents": ["x"]}, "query", ""),
        ("/rerank", {"query": "x", "documents": []}, "documents", ""),
        ("/rerank", {"query": "x", "documents": [""]}, "documents", "empty"),
        ("/rerank", {"query": "x", "documents": [5]}, "documents", ""),
        ("/rerank", {"query": "x", "documents": [{"title": "y"}]}, "documents", ""),
        ("/rerank", {"query": "x", "documents": ["y"] * 1025}, "documents", ""),
        ("/rerank", {"query": "x", "documents": ["water " * 3000]}, "documents", "too long"),
        ("/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n", ""),
        ("/rerank", {"query": "x", "documents": ["y"], "max_tokens_per_doc": 5}, "max_tokens", "supported"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", "can't be paired"),
        ("/score", {"text_1": [], "text_2": "x"}, "text_1", ""),
        ("/score", {"text_1": "x"}, "text_2", ""),
    ],
)
def test_what_is_refused(served: Served, route: str, body: dict[str, Any], param: str, message: str) -> None:
    response = served.post(route, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert param in str(error["param"])
    assert message in error["message"]


def test_a_model_without_the_tokens(shared_server: Served) -> None:
    response = shared_server.post("/rerank", query="x", documents=["y"])
    assert response.status_code == 400
    assert "--rerank-tokens" in response.json()["error"]["message"]


def test_an_embedding_model_scores_by_cosine(tmp_path: Path) -> None:
    path = build_embedding(tmp_path / "embedder")
    expected = [one.score for one in LLM(path, kv_cache_memory="2MB", num_threads=1).score(QUERY, DOCUMENTS)]
    served, stop = start_server(path)
    try:
        answer = post(served, "/score", text_1=QUERY, text_2=DOCUMENTS)
        assert [one["score"] for one in answer["data"]] == expected
    finally:
        stop()
