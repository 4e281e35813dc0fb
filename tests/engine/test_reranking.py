"""Scores of pairs: those of transformers, the same cached or not, for three kinds of models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from stemma import LLM
from stemma.errors import InvalidRequest, UnsupportedModel
from tests.pooled_checkpoints import (
    PROMPTS,
    build_classifier,
    build_embedding,
    build_reranker,
    tokenizer,
    write,
    write_modules,
)

SETTINGS = {"kv_cache_memory": "4MB", "block_size": 16}
QUERY = "How many days has a week?"
DOCUMENTS = [
    "There are seven days in a week.",
    "He bought three apples for two coins each.",
    "The oldest goes first. " * 12,
]
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""As Qwen3-Reranker was published."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def ids_of(path: Path, prompt: str = PROMPT, instruction: str = INSTRUCTION) -> list[torch.Tensor]:
    words = AutoTokenizer.from_pretrained(path)
    texts = [prompt.format(instruction=instruction, query=QUERY, document=one) for one in DOCUMENTS]
    return [torch.tensor([words.encode(text, add_special_tokens=False)]) for text in texts]


def probabilities(
    path: Path, prompts: list[torch.Tensor], true: str = "yes", false: str = "no"
) -> list[float]:
    """What Qwen3-Reranker's own code computes: a softmax over two logits of the last token."""
    words = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = [words.convert_tokens_to_ids(false), words.convert_tokens_to_ids(true)]
    with torch.inference_mode():
        rows = [model(ids).logits[0, -1, tokens] for ids in prompts]
    return [float(torch.softmax(row, dim=-1)[1]) for row in rows]


def test_two_tokens_of_a_causal_model(tmp_path: Path) -> None:
    path = build_reranker(tmp_path / "model")
    llm = LLM(path, **SETTINGS)
    found = [one.score for one in llm.score(QUERY, DOCUMENTS)]
    np.testing.assert_allclose(found, probabilities(path, ids_of(path)), atol=1e-4)
    other = [one.score for one in llm.score(QUERY, DOCUMENTS, instruction="Find the answer")]
    np.testing.assert_allclose(
        other, probabilities(path, ids_of(path, instruction="Find the answer")), atol=1e-4
    )
    llm.engine.check()


def test_the_shared_prefix_is_computed_once(tmp_path: Path) -> None:
    """Of all documents but one, only their own tokens are computed; and the scores keep their bits."""
    llm = LLM(build_reranker(tmp_path / "model"), **SETTINGS)
    first, *others = llm.score(QUERY, DOCUMENTS)
    words = tokenizer()
    shared = len(words.encode(PROMPT.partition("{document}")[0].format(instruction=INSTRUCTION, query=QUERY)))
    assert first.caches[0].num_cached_tokens == 0
    assert all(one.caches[0].num_cached_tokens >= shared - 1 for one in others)
    again = llm.score(QUERY, DOCUMENTS)
    assert [one.score for one in again] == [one.score for one in (first, *others)]
    for one in again:
        assert one.caches[0].num_cached_tokens == one.caches[0].num_prompt_tokens - 1


def test_other_tokens(tmp_path: Path) -> None:
    path = build_reranker(tmp_path / "model")
    llm = LLM(path, **SETTINGS, rerank_tokens=("no", "yes"))
    found = [one.score for one in llm.score(QUERY, DOCUMENTS)]
    np.testing.assert_allclose(found, probabilities(path, ids_of(path), "no", "yes"), atol=1e-4)
    with pytest.raises(InvalidRequest, match="no single tokens for relevant and irrelevant"):
        LLM(path, **SETTINGS, rerank_tokens="relevant,irrelevant").score(QUERY, DOCUMENTS)


def test_tokens_and_template_of_the_checkpoint(tmp_path: Path) -> None:
    """A CrossEncoder of sentence-transformers names its tokens, and has a template for pairs."""
    path = build_reranker(tmp_path / "model")
    words = AutoTokenizer.from_pretrained(path)
    write_modules(path, ["Transformer", "LogitScore"])
    ids = {"true_token_id": words.convert_tokens_to_ids("no"), "false_token_id": 7}
    write(path / "1_LogitScore" / "config.json", ids)
    words.chat_template = (
        "{%- for m in messages -%}{%- if m.role == 'query' -%}{{ 'Q ' + m.content }}{%- endif -%}"
        "{%- if m.role == 'document' -%}{{ ' D ' + m.content + ' =' }}{%- endif -%}{%- endfor -%}"
    )
    words.save_pretrained(path)
    found = [one.score for one in LLM(path, **SETTINGS).score(QUERY, DOCUMENTS)]
    false = str(words.convert_ids_to_tokens(7))
    prompts = ids_of(path, "Q {query} D {document} =")
    np.testing.assert_allclose(found, probabilities(path, prompts, "no", false), atol=1e-4)


def test_a_sequence_classifier(tmp_path: Path) -> None:
    path = build_classifier(tmp_path / "model")
    llm = LLM(path, **SETTINGS)
    found = [one.score for one in llm.score(QUERY, DOCUMENTS)]
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        wanted = [float(torch.sigmoid(model(ids).logits[0, 0])) for ids in ids_of(path)]
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert [one.score for one in llm.score(QUERY, DOCUMENTS)] == found
    with pytest.raises(InvalidRequest, match="generates no text"):
        llm.generate("A river")
    with pytest.raises(InvalidRequest, match="no embeddings"):
        llm.embed("A river")


def test_a_sequence_classifier_through_modules(tmp_path: Path) -> None:
    path = build_classifier(tmp_path / "model", hidden_act="gelu")
    found = [one.score for one in LLM(path, **SETTINGS).score(QUERY, DOCUMENTS)]
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        wanted = [float(torch.sigmoid(model(ids).logits[0, 0])) for ids in ids_of(path)]
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_more_labels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="3 labels"):
        LLM(build_classifier(tmp_path / "model", num_labels=3), **SETTINGS)


def test_cosine_of_embeddings(tmp_path: Path) -> None:
    llm = LLM(build_embedding(tmp_path / "model"), **SETTINGS)
    found = llm.score(QUERY, DOCUMENTS)
    query, *documents = [one.vector for one in llm.embed([PROMPTS["query"] + QUERY, *DOCUMENTS])]
    np.testing.assert_allclose([one.score for one in found], [query @ one for one in documents], atol=1e-6)
    assert len(found[0].caches) == 2
    with pytest.raises(InvalidRequest, match="leave it out"):
        llm.score(QUERY, DOCUMENTS, instruction="Find the answer")


def test_pairs(tmp_path: Path) -> None:
    llm = LLM(build_reranker(tmp_path / "model"), **SETTINGS)
    whole = [one.score for one in llm.score(QUERY, DOCUMENTS)]
    assert [one.score for one in llm.score([QUERY] * 3, DOCUMENTS)] == whole
    assert [one.score for one in llm.score(QUERY, DOCUMENTS[1])] == whole[1:2]
    with pytest.raises(InvalidRequest, match="2 texts can't be paired with 3"):
        llm.score([QUERY] * 2, DOCUMENTS)
