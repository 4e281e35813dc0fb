"""Embeddings and scores on several ranks: each has all hidden states, unless tokens are divided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stemma import LLM
from stemma.errors import ConfigError
from tests.pooled_checkpoints import build_embedding, build_reranker

SETTINGS = {"kv_cache_memory": "2MB", "block_size": 16, "num_threads": 1}
TEXTS = ["A river runs through the valley. " * 6, "There are seven days in a week."]


@pytest.mark.slow
def test_they_are_those_of_one_process(tmp_path: Path) -> None:
    path = build_embedding(tmp_path / "embedder", "mean", tie_word_embeddings=False)
    alone = LLM(path, **SETTINGS).embed(TEXTS)
    llm = LLM(path, **SETTINGS, tensor_parallel_size=2)
    try:
        found = llm.embed(TEXTS)
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one.vector, other.vector, atol=1e-4)
        for one, other in zip(found, llm.embed(TEXTS), strict=True):
            np.testing.assert_array_equal(one.vector, other.vector)
    finally:
        llm.close()


@pytest.mark.slow
def test_scores_where_tokens_are_divided(tmp_path: Path) -> None:
    path = build_reranker(tmp_path / "reranker")
    alone = LLM(path, **SETTINGS).score("How many days?", TEXTS)
    llm = LLM(path, **SETTINGS, context_parallel_size=2)
    try:
        found = llm.score("How many days?", TEXTS)
        np.testing.assert_allclose([o.score for o in found], [o.score for o in alone], atol=1e-4)
    finally:
        llm.close()


def test_embeddings_where_tokens_are_divided(tmp_path: Path) -> None:
    path = build_embedding(tmp_path / "embedder")
    with pytest.raises(ConfigError, match="no rank has all hidden states"):
        LLM(path, **SETTINGS, context_parallel_size=2)
