"""Results of a loaded model beside text: embeddings of prompts, and scores of how well two texts match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from stemma.errors import InvalidRequest

PoolingKind: TypeAlias = Literal["last", "mean", "cls"]
"""Which hidden states behind the final norm an embedding is made of: the last token's, the mean of all, or
the first token's."""
_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class EmbeddingFormat:
    """How a prompt's hidden states become its embedding."""

    kind: PoolingKind
    size: int
    """Numbers of an embedding, uncut: the model's hidden size."""
    normalizes: bool = True
    """Whether embeddings have length 1 unless a request says otherwise."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """By name: what is put before a text."""
    default_prompt: str | None = None
    """Name of the prompt of requests that name none; None: they get none."""
    dimensions: tuple[int, ...] | None = None
    """Sizes that embeddings may be cut to (Matryoshka); empty: any; None: the model wasn't trained for it."""

    def prompt(self, name: str | None) -> str:
        """Return what goes before a text. Raises InvalidRequest for an unknown name."""
        chosen = self.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in self.prompts:
            known = ", ".join(sorted(self.prompts)[:_MAX_SHOWN]) or "none"
            raise InvalidRequest(
                f"this model has no prompt of that name; it has {known}", param="prompt_name"
            )
        return self.prompts[chosen]

    def prompt_of_pair(self, *names: str) -> str:
        """Return the first prompt of one of these names, else the default, else none."""
        found = next((name for name in names if name in self.prompts), None)
        return self.prompt(found)

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidRequest unless embeddings may be cut to `dimensions`; None: they aren't cut."""
        if dimensions is None:
            return
        if self.dimensions is None:
            raise InvalidRequest(
                "this model wasn't trained to have its embeddings cut, as far as its config.json says "
                "(is_matryoshka, matryoshka_dimensions); leave dimensions out, or serve it with --matryoshka",
                param="dimensions",
            )
        if self.dimensions and dimensions not in self.dimensions:
            sizes = ", ".join(map(str, self.dimensions[:_MAX_SHOWN]))
            raise InvalidRequest(f"dimensions must be one of {sizes}", param="dimensions")
        if dimensions > self.size:
            raise InvalidRequest(
                f"dimensions must be at most {self.size}, the size of this model's embeddings",
                param="dimensions",
            )

    def finish(
        self, pooled: npt.NDArray[np.float32], dimensions: int | None = None, normalizes: bool | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the embedding [D] of what was pooled, [H]: cut to `dimensions`, then of length 1.

        `normalizes` None: as the checkpoint says. Raises InvalidRequest as `check_dimensions`.
        """
        self.check_dimensions(dimensions)
        vector = pooled if dimensions is None else pooled[:dimensions]
        if not (self.normalizes if normalizes is None else normalizes):
            return vector
        exact = vector.astype(np.float64)
        length = float(np.sqrt((exact * exact).sum()))
        return (exact / max(length, 1e-12)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class ScoreTokens:
    """The two tokens whose logits say whether a document answers a query."""

    true_id: int
    false_id: int


@dataclass(frozen=True, slots=True, eq=False)
class ScoreHead:
    """The head of a sequence classifier with one label: a score from the last token's hidden state."""

    weight: npt.NDArray[np.float64]
    """[H]."""
    is_probability: bool = True
    """Whether a sigmoid makes the score a probability."""

    def score(self, state: npt.NDArray[np.float32]) -> float:
        """Return the score of a hidden state [H]."""
        logit = float((self.weight * state).sum())
        return sigmoid(logit) if self.is_probability else logit


@dataclass(frozen=True, slots=True)
class Abilities:
    """The uses that a checkpoint is made for."""

    generates: bool = True
    """False: its output head is missing, or wasn't trained with what the checkpoint is for."""
    embedding: EmbeddingFormat | None = None
    """None: it makes no embeddings."""
    score_head: ScoreHead | None = None
    score_tokens: ScoreTokens | None = None
    """As the checkpoint names them; None: settings do."""
    is_qwen3: bool = False
    """Whether a query and a document are put to it as to Qwen3-Reranker."""

    def embedding_format(self) -> EmbeddingFormat:
        """Return how embeddings are made. Raises InvalidRequest if the model makes none."""
        if self.embedding is None:
            raise InvalidRequest(
                "this model makes no embeddings: its checkpoint has no modules.json of sentence-transformers "
                "with a pooling; serve it with --pooling to have them nevertheless",
                param="model",
            )
        return self.embedding

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state; 0: none is used."""
        if self.embedding is not None:
            return self.embedding.size
        return 0 if self.score_head is None else len(self.score_head.weight)

    @property
    def needs_hidden(self) -> bool:
        """Whether hidden states are what it is used for."""
        return self.embedding is not None or self.score_head is not None


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit))."""
    small = float(np.exp(-abs(logit)))
    return 1.0 / (1.0 + small) if logit >= 0 else small / (1.0 + small)
