"""Embeddings and scores have the same bits, cached or not, in any batch and chunks, from every tier."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stemma import LLM, SamplingParams
from stemma.engine.pooling import Vector
from tests import checkpoints, hybrids
from tests.adapters import build_adapter
from tests.invariance.serving import NO_CACHE, engine, small_device
from tests.pooled_checkpoints import build_embedding, build_reranker

ROUNDS = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def prompts_of(seed: int = 0) -> list[list[int]]:
    """Prompts over two long prefixes, one of them a prefix of another, and a short one."""
    rng = random.Random(seed)

    def words(num_tokens: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(num_tokens)]

    prefixes = [words(150), words(37)]
    prompts = [prefixes[number % 2] + words(rng.randrange(1, 60)) for number in range(8)]
    return [*prompts, prompts[0] + words(9), words(1)]


def ways_of(llm: LLM, folder: Path) -> dict[str, dict[str, Any]]:
    small = {**small_device(llm), "load_when": "always"}
    return {
        "device": {},
        "small chunks, two threads": {"max_batch_tokens": 19, "num_threads": 2},
        "preempted": small,
        "host": {**small, "host_cache": "8MB"},
        "disk": {**small, "disk_cache": str(folder), "disk_cache_size": "64MB"},
        "disk again": {**small, "disk_cache": str(folder), "disk_cache_size": "64MB"},
        "hashes": {"index": "hash", "block_size": 8},
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_embeddings(tmp_path: Path, pooling: str, dtype: str) -> None:
    path = build_embedding(tmp_path / "model", pooling, dtype=DTYPES[dtype])
    prompts = prompts_of()
    with engine(path, dtype, **NO_CACHE) as llm:
        expected = [llm.embed([prompt])[0].vector for prompt in prompts]
        ways = ways_of(llm, tmp_path / "disk")
    rng = random.Random(1)
    for way, settings in ways.items():
        with engine(path, dtype, **settings) as llm:
            for _ in range(ROUNDS):
                order = rng.sample(range(len(prompts)), len(prompts))
                _check_all(way, expected, order, [o.vector for o in llm.embed([prompts[i] for i in order])])
                for number in order[:3]:
                    _check_all(way, expected, [number], [llm.embed([prompts[number]])[0].vector])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_beside_answers(tmp_path: Path, dtype: str) -> None:
    """The same prompts are embedded and answered, in turn: each reuses what the other computed."""
    path = build_reranker(tmp_path / "model")
    prompts = prompts_of()
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
    with engine(path, dtype, **NO_CACHE, pooling="last") as llm:
        vectors = [llm.embed([prompt])[0].vector for prompt in prompts]
        answers = [llm.generate([prompt], params)[0].completions[0] for prompt in prompts]
    with engine(path, dtype, pooling="last", max_batch_tokens=64) as llm:
        for _ in range(ROUNDS):
            found = [one.completions[0] for one in llm.generate(prompts, params)]
            assert [(o.token_ids, o.logprobs) for o in found] == [(o.token_ids, o.logprobs) for o in answers]
            again = llm.embed(prompts)
            _check_all("beside answers", vectors, range(len(prompts)), [one.vector for one in again])
        assert all(one.cache.num_cached_tokens == len(p) - 1 for one, p in zip(again, prompts, strict=True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", ["qwen3_next", "mistral-sliding", "deepseek-v3"])
def test_other_kinds_of_layers(tmp_path: Path, family: str, pooling: str) -> None:
    """Recurrent states, windows and latents: what is cached of them are other things than keys and values."""
    path = (checkpoints if family in checkpoints.FAMILIES else hybrids).build(family, tmp_path / "model")
    prompts = prompts_of()
    with engine(path, "float32", **NO_CACHE, pooling=pooling) as llm:
        expected = [llm.embed([prompt])[0].vector for prompt in prompts]
        ways = ways_of(llm, tmp_path / "disk")
    for way in ("device", "small chunks, two threads", "preempted"):
        with engine(path, "float32", **ways[way], pooling=pooling) as llm:
            for _ in range(ROUNDS):
                found = [one.vector for one in llm.embed(prompts)]
                _check_all(way, expected, range(len(prompts)), found)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_adapters(tmp_path: Path, pooling: str) -> None:
    """Prompts with an adapter and without one, in turn: each shares with its own."""
    path = build_reranker(tmp_path / "model")
    adapter = build_adapter(path, tmp_path / "adapter", seed=3)
    prompts = prompts_of()
    lora: dict[str, Any] = {"lora": {"one": adapter}, "pooling": pooling}
    with engine(path, "float32", **NO_CACHE, **lora) as llm:
        expected = {
            name: [llm.embed([prompt], lora=name)[0].vector for prompt in prompts] for name in (None, "one")
        }
    assert not np.array_equal(expected[None][0], expected["one"][0])
    with engine(path, "float32", max_batch_tokens=64, **lora) as llm:
        for _ in range(ROUNDS):
            for name, wanted in expected.items():
                found = [one.vector for one in llm.embed(prompts, lora=name)]
                _check_all(str(name), wanted, range(len(prompts)), found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores(tmp_path: Path, dtype: str) -> None:
    path = build_reranker(tmp_path / "model")
    documents = [
        f"The tree number {number} has {number * 7} leaves. " * (1 + number % 4) for number in range(8)
    ]
    queries = ["How many leaves?", "Which tree has a single root?"]
    with engine(path, dtype, **NO_CACHE) as llm:
        expected = {q: [llm.score(q, one)[0].score for one in documents] for q in queries}
        ways = ways_of(llm, tmp_path / "disk")
    for way, settings in ways.items():
        with engine(path, dtype, **settings) as llm:
            for query in queries * ROUNDS:
                assert [one.score for one in llm.score(query, documents)] == expected[query], way


def _check_all(way: str, expected: list[Vector], order: Any, found: list[Vector]) -> None:
    for number, vector in zip(order, found, strict=True):
        np.testing.assert_array_equal(vector, expected[number], err_msg=way)
