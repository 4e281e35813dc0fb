"""How well a document answers a query: which texts the model gets, and the score in what it gives.

A reranker reads both texts in one prompt: instruction and query first, so that all documents share them in
the prefix cache. A model that generates is asked for yes or no, and the two tokens' logits are the score; a
sequence classifier has a head for it. An embedding model reads each text alone; their cosine is the score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from stemma.engine.pooling import Pooling, Vector
from stemma.errors import InvalidRequest
from stemma.model.opened.abilities import Abilities, EmbeddingFormat, ScoreHead, ScoreTokens, sigmoid
from stemma.model.text.tokenizer import Tokenizer

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction that Qwen3-Reranker was trained with, for where a request brings no instruction."""
_TINY = 1e-24


class Scoring(Protocol):
    """How one model scores pairs of texts."""

    pooling: Pooling
    """The kind of vector that each text gets."""
    adds_special_tokens: bool
    """Whether the tokenizer puts its special tokens around the texts."""

    def texts(self, query: str, document: str, instruction: str | None) -> tuple[str, ...]:
        """Return what the model reads for a pair. Raises InvalidRequest."""

    def score(self, vectors: Sequence[Vector]) -> float:
        """Return the score of a pair from what the model gave for its `texts`, in their order."""


def scoring_of(abilities: Abilities, tokenizer: Tokenizer, rerank_tokens: Sequence[str]) -> Scoring:
    """Return how a model scores pairs; `rerank_tokens` are those for a match and for none.

    Raises InvalidRequest for a model that can't.
    """
    if abilities.score_head is not None:
        return HeadScoring(PairPrompt(tokenizer, is_qwen3=abilities.is_qwen3), abilities.score_head)
    if abilities.generates:
        tokens = abilities.score_tokens or _tokens_of(tokenizer, rerank_tokens)
        return TokenScoring(PairPrompt(tokenizer, is_qwen3=abilities.is_qwen3), tokens)
    assert abilities.embedding is not None
    return CosineScoring(abilities.embedding)


def _tokens_of(tokenizer: Tokenizer, names: Sequence[str]) -> ScoreTokens:
    found = [tokenizer.encode(name, add_special_tokens=False).tolist() for name in names]
    if any(len(ids) != 1 for ids in found):
        raise InvalidRequest(
            f"this model can't rerank: its tokenizer has no single tokens for {' and '.join(names)}; serve "
            "it with others (--rerank-tokens), or take a reranker",
            param="model",
        )
    return ScoreTokens(found[0][0], found[1][0])


def pairs_of(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of one query with each document, or of texts at the same places.

    Raises InvalidRequest if their numbers differ.
    """
    firsts = [queries] if isinstance(queries, str) else list(queries)
    seconds = [documents] if isinstance(documents, str) else list(documents)
    if not firsts or not seconds or len(firsts) not in (1, len(seconds)):
        raise InvalidRequest(
            f"{len(firsts)} texts can't be paired with {len(seconds)}: give one, or as many", param="text_1"
        )
    if len(firsts) == 1:
        firsts *= len(seconds)
    return list(zip(firsts, seconds, strict=True))


class PairPrompt:
    """Puts a query and a document into one prompt, the query first."""

    def __init__(self, tokenizer: Tokenizer, *, is_qwen3: bool) -> None:
        """`is_qwen3`: the prompt that Qwen3-Reranker was published with, if no template knows better."""
        self._tokenizer = tokenizer
        self._is_qwen3 = is_qwen3
        template = tokenizer.chat_template or ""
        self._knows_pairs = all(f"'{role}'" in template or f'"{role}"' in template for role in _ROLES)

    def text(self, query: str, document: str, instruction: str | None) -> str:
        """Return the prompt. Raises InvalidRequest if the model has no template for it, or that fails."""
        if self._knows_pairs:
            messages = [] if instruction is None else [{"role": "system", "content": instruction}]
            messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
            return self._tokenizer.render_chat(messages)
        asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        if self._is_qwen3:
            return (
                f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n"
                "<|im_start|>assistant\n<think>\n\n</think>\n\n"
            )
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest("this model can't rerank: it has no chat template", param="model")
        thinks = "enable_thinking" in self._tokenizer.template_variables
        return self._tokenizer.render_chat(
            [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}],
            template_kwargs={"enable_thinking": False} if thinks else {},
        )


_ROLES = ("query", "document")
"""Roles of messages in chat templates that are made for pairs."""


class TokenScoring:
    """The probability of one token against another's, behind the prompt."""

    adds_special_tokens = False

    def __init__(self, prompt: PairPrompt, tokens: ScoreTokens) -> None:
        self._prompt = prompt
        self.pooling = Pooling("logits", (tokens.true_id, tokens.false_id))

    def texts(self, query: str, document: str, instruction: str | None) -> tuple[str, ...]:
        """Return the one prompt of the pair."""
        return (self._prompt.text(query, document, instruction),)

    def score(self, vectors: Sequence[Vector]) -> float:
        """Return the true token's probability, between 0 and 1."""
        (logits,) = vectors
        return sigmoid(float(logits[0]) - float(logits[1]))


class HeadScoring:
    """Scores that a sequence classifier's head makes from the last token's hidden state."""

    adds_special_tokens = False

    def __init__(self, prompt: PairPrompt, head: ScoreHead) -> None:
        self._prompt = prompt
        self._head = head
        self.pooling = Pooling("last")

    def texts(self, query: str, document: str, instruction: str | None) -> tuple[str, ...]:
        """Return the one prompt of the pair."""
        return (self._prompt.text(query, document, instruction),)

    def score(self, vectors: Sequence[Vector]) -> float:
        """Return the head's score of the last token's state."""
        (state,) = vectors
        return self._head.score(state)


class CosineScoring:
    """The cosine of two embeddings, each made with the prompt that the checkpoint has for it."""

    adds_special_tokens = True

    def __init__(self, embedding: EmbeddingFormat) -> None:
        self._query_prompt = embedding.prompt_of_pair("query")
        self._document_prompt = embedding.prompt_of_pair("document", "passage", "corpus")
        self.pooling = Pooling(embedding.kind)

    def texts(self, query: str, document: str, instruction: str | None) -> tuple[str, ...]:
        """Return the texts of query and document; raise InvalidRequest for an instruction."""
        if instruction is not None:
            raise InvalidRequest(
                "an embedding model takes its instruction from the checkpoint's prompts; leave it out",
                param="instruction",
            )
        return (self._query_prompt + query, self._document_prompt + document)

    def score(self, vectors: Sequence[Vector]) -> float:
        """Return the cosine, between -1 and 1."""
        query, document = (one.astype(np.float64) for one in vectors)
        norms = float((query * query).sum()) * float((document * document).sum())
        return float((query * document).sum()) / math.sqrt(max(norms, _TINY))
