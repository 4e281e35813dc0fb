"""Embeddings: those of transformers, whatever is cached; and what checkpoints and requests say of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from stemma import LLM, SamplingParams
from stemma.errors import InvalidRequest
from tests import hybrids
from tests.pooled_checkpoints import PROMPTS, build_embedding, build_reranker

TEXTS = [
    "A river that runs through the valley carries water.",
    "There are seven days in a week, twelve months in a year.",
    "Every morning she walks along the same path, past the old mill. " * 8,
]
SETTINGS = {"kv_cache_memory": "2MB", "block_size": 16}


def expected(path: Path, texts: list[str], pooling: str, *, normalizes: bool = True) -> torch.Tensor:
    """What transformers' own model makes of each text by itself."""
    words = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    rows = []
    with torch.inference_mode():
        for text in texts:
            states = model(torch.tensor([words.encode(text)])).last_hidden_state[0]
            rows.append({"last": states[-1], "mean": states.mean(dim=0), "cls": states[0]}[pooling])
    found = torch.stack(rows)
    return torch.nn.functional.normalize(found, dim=-1) if normalizes else found


@pytest.mark.parametrize("headless", [True, False], ids=["headless", "with head"])
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_they_are_those_of_transformers(tmp_path: Path, pooling: str, headless: bool) -> None:
    path = build_embedding(tmp_path / "model", pooling, headless=headless)
    llm = LLM(path, **SETTINGS)
    found = llm.embed(TEXTS)
    vectors = np.stack([one.vector for one in found])
    np.testing.assert_allclose(vectors, expected(path, TEXTS, pooling).numpy(), atol=2e-4)
    assert vectors.dtype == np.float32
    assert [int(one.prompt_token_ids[-1]) for one in found] == [0, 0, 0]  # the tokenizer ends texts
    llm.engine.check()


def test_without_a_head_though_the_config_wants_one(tmp_path: Path) -> None:
    path = build_embedding(tmp_path / "model", tie_word_embeddings=False)
    found = LLM(path, **SETTINGS).embed(TEXTS[0])
    np.testing.assert_allclose(found[0].vector, expected(path, TEXTS[:1], "last")[0].numpy(), atol=2e-4)


def test_modules_of_transformers_give_the_same(tmp_path: Path) -> None:
    """An activation that the native step doesn't know: the model runs through its modules."""
    path = build_embedding(tmp_path / "model", "mean", hidden_act="gelu", normalizes=False)
    found = LLM(path, **SETTINGS).embed(TEXTS)
    wanted = expected(path, TEXTS, "mean", normalizes=False).numpy()
    np.testing.assert_allclose(np.stack([one.vector for one in found]), wanted, atol=5e-4)


def test_a_model_whose_base_has_another_name(tmp_path: Path) -> None:
    """Llama 4's text model: transformers looks for its base where the model with images has it."""
    path = tmp_path / "model"
    hybrids.build("llama4_text", path)
    found = LLM(path, **SETTINGS, pooling="mean").embed(TEXTS[0])
    np.testing.assert_allclose(found[0].vector, expected(path, TEXTS[:1], "mean")[0].numpy(), atol=2e-4)


def test_the_last_token_uses_the_cache_and_the_mean_does_not(tmp_path: Path) -> None:
    for pooling in ("last", "mean"):
        llm = LLM(build_embedding(tmp_path / pooling, pooling), **SETTINGS)
        [cold] = llm.embed(TEXTS[2])
        [again] = llm.embed(TEXTS[2])
        np.testing.assert_array_equal(cold.vector, again.vector)
        num_cached = len(again.prompt_token_ids) - 1 if pooling == "last" else 0
        assert again.cache.num_cached_tokens == num_cached
        assert again.cache.miss_reason == ("last_token" if pooling == "last" else "recomputed")
        llm.engine.check()


def test_prompts_of_the_checkpoint(tmp_path: Path) -> None:
    llm = LLM(build_embedding(tmp_path / "model"), **SETTINGS)
    [named] = llm.embed("how many?", prompt_name="query")
    [whole] = llm.embed(PROMPTS["query"] + "how many?")
    np.testing.assert_array_equal(named.vector, whole.vector)
    [other] = llm.embed("how long?", prompt_name="query")
    assert other.cache.num_cached_tokens > 10
    with pytest.raises(InvalidRequest, match="no prompt of that name; it has document, query"):
        llm.embed("x", prompt_name="nothing")


def test_dimensions(tmp_path: Path) -> None:
    path = build_embedding(tmp_path / "model")
    with pytest.raises(InvalidRequest, match="--matryoshka"):
        LLM(path, **SETTINGS).embed("x", dimensions=8)
    llm = LLM(path, **SETTINGS, matryoshka=True)
    [whole], [cut] = llm.embed("x"), llm.embed("x", dimensions=8)
    np.testing.assert_allclose(cut.vector, whole.vector[:8] / np.linalg.norm(whole.vector[:8]), atol=1e-6)
    [raw] = llm.embed("x", dimensions=8, normalize=False)
    assert abs(np.linalg.norm(raw.vector) - 1) > 0.1
    with pytest.raises(InvalidRequest, match="at most 64"):
        llm.embed("x", dimensions=65)
    listed = LLM(build_embedding(tmp_path / "listed", matryoshka_dimensions=[8, 16]), **SETTINGS)
    assert len(listed.embed("x", dimensions=16)[0].vector) == 16
    with pytest.raises(InvalidRequest, match="one of 8, 16"):
        listed.embed("x", dimensions=9)


def test_an_embedding_model_generates_nothing(tmp_path: Path) -> None:
    llm = LLM(build_embedding(tmp_path / "model"), **SETTINGS)
    with pytest.raises(InvalidRequest, match="generates no text"):
        llm.generate("A river", SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequest, match="empty"):
        llm.embed([[]])
    assert len(llm.embed([[5, 6, 7]])[0].vector) == 64


def test_a_model_that_generates_embeds_if_asked(tmp_path: Path) -> None:
    path = build_reranker(tmp_path / "model")
    with pytest.raises(InvalidRequest, match="makes no embeddings"):
        LLM(path, **SETTINGS).embed("x")
    llm = LLM(path, **SETTINGS, pooling="mean")
    np.testing.assert_allclose(
        llm.embed(TEXTS[0])[0].vector, expected(path, TEXTS[:1], "mean")[0].numpy(), atol=2e-4
    )
    assert llm.generate("A river", SamplingParams(max_tokens=2))[0].completions[0].token_ids


def test_beside_answers_and_in_steps_that_overlap(tmp_path: Path) -> None:
    path = build_reranker(tmp_path / "model")
    alone = LLM(path, **SETTINGS, pooling="mean").embed(TEXTS)
    ahead = LLM(path, **SETTINGS, pooling="mean", overlap_schedule="on", speculation="off")
    again = ahead.embed(TEXTS)
    for one, other in zip(alone, again, strict=True):
        np.testing.assert_array_equal(one.vector, other.vector)
    ahead.close()
