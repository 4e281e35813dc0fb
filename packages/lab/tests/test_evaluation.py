"""Perplexity and choices: as plain transformers computes them, and the same from the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import hybrids
from tests.model.paging import plain_logits

from stemma.engine.build import EngineParts, build_engine
from stemma.engine.llm import engine_settings
from stemma.errors import ConfigError
from stemma.native.library import load_kernels
from stemma.prefix.keys import Namespace
from stemma_lab.evaluation import Evaluator

TEXT = "the cat sat on the mat, and the dog looked at it for a long time. " * 12
WINDOW = 300


@pytest.fixture(scope="module")
def parts(checkpoint: Path) -> Iterator[EngineParts]:
    settings = engine_settings(checkpoint, dtype="float32", device="cpu", kv_cache_memory="4MB")
    built = build_engine(settings)
    yield built
    built.engine.close()


def plain_logprobs(checkpoint: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [T, vocab] of plain transformers."""
    return torch.log_softmax(plain_logits(checkpoint, tokens).double(), dim=-1)


def test_perplexity_is_that_of_transformers_and_the_same_from_the_cache(
    parts: EngineParts, checkpoint: Path
) -> None:
    evaluator = Evaluator(parts)
    found = evaluator.perplexity(TEXT, WINDOW)
    total = 0.0
    windows = [window.tolist() for window in evaluator.windows(TEXT, WINDOW)]
    for tokens in windows:
        own = plain_logprobs(checkpoint, tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
        total -= float(own.sum())
    assert found.num_tokens == sum(len(tokens) - 1 for tokens in windows)
    assert found.cold == pytest.approx(math.exp(total / found.num_tokens), rel=1e-5)
    assert found.num_cached_tokens == sum(len(tokens) // 2 for tokens in windows)
    if load_kernels() is not None:
        assert found.same_bits
        assert found.warm == found.cold


def test_the_likeliest_answer_is_chosen_cached_or_not(parts: EngineParts, checkpoint: Path) -> None:
    evaluator, namespace = Evaluator(parts), Namespace(salt="choices")
    answers = [" a", " b", " c"]
    prompts = [TEXT[:300] + ending for ending in ("one", "two", "three")]
    for number, prompt in enumerate(prompts):
        cached = evaluator.choose(prompt, answers, namespace, cached=True)
        cold = evaluator.choose(prompt, answers, namespace, cached=False)
        tokens = parts.tokenizer.encode(prompt).tolist()
        ids = [int(parts.tokenizer.encode(answer)[0]) for answer in answers]
        expected = plain_logprobs(checkpoint, tokens)[-1][ids].numpy()
        assert cold.num_cached_tokens == 0
        assert (cached.num_cached_tokens > 0) == (number > 0)
        assert cold.index == int(np.argmax(expected))
        np.testing.assert_allclose(cold.logprobs, expected, atol=1e-4)
        if load_kernels() is not None:
            assert (cold.logprobs == cached.logprobs).all()
    parts.engine.cache.check()


def test_too_little_text_and_too_long_windows_are_refused(parts: EngineParts) -> None:
    evaluator = Evaluator(parts)
    with pytest.raises(ConfigError, match="two are needed"):
        evaluator.perplexity("", 100)
    with pytest.raises(ConfigError, match="this model and cache take"):
        evaluator.perplexity(TEXT, 1 << 20)
    with pytest.raises(ConfigError, match="a prompt has"):
        evaluator.choose(TEXT * 20, [" a"], Namespace(), cached=False)


@pytest.mark.parametrize(
    ("family", "message"), [("gemma3_text", "free_windows"), ("qwen3_next", "recurrent")]
)
def test_models_that_keep_more_than_kv_are_refused(tmp_path: Path, family: str, message: str) -> None:
    """Their steps need tables of pages and states, which these steps don't make."""
    hybrids.build(family, tmp_path)
    built = build_engine(engine_settings(tmp_path, dtype="float32", device="cpu", kv_cache_memory="16MB"))
    with pytest.raises(ConfigError, match=message):
        Evaluator(built)
    built.engine.close()
