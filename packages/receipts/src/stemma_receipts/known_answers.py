"""Answers that are known as drafts: the engine checks them, many tokens in one pass.

A draft never changes what is drawn (`engine/drafts/source.py`), so a wrong one is found, token by token.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from stemma.engine.api import DraftCount
from stemma.prefix.keys import Namespace
from stemma.types import TokenArray, as_tokens


class KnownAnswers:
    """A `DraftGuesser`. Each receipt has a namespace of its own, whose salt is its number."""

    def __init__(self) -> None:
        self.counts: Mapping[str, DraftCount] = {}
        self._answers: dict[str, tuple[int, list[TokenArray]]] = {}

    def know(self, salt: str, num_prompt_tokens: int, answers: Sequence[Sequence[int]]) -> None:
        """Take the answers of a receipt."""
        self._answers[salt] = (num_prompt_tokens, [as_tokens(one) for one in answers])

    def propose(
        self,
        key: Hashable,
        namespace: Namespace,
        tokens: TokenArray,
        max_tokens: int,
        forced: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Return how an answer goes on that begins as the sequence does."""
        num_prompt, answers = self._answers[namespace.salt]
        drawn = tokens[num_prompt:]
        for answer in answers:
            if len(answer) > len(drawn) and np.array_equal(answer[: len(drawn)], drawn):
                return tuple(answer[len(drawn) : len(drawn) + max_tokens].tolist())
        return ()

    def begin_step(self, num_sequences: int, *, may_be_forced: bool = False) -> bool:
        """Return True: what is drafted is likely to hold."""
        return True

    def observe(
        self, key: Hashable, tokens: TokenArray, draft: Sequence[int], drawn: Sequence[int]
    ) -> str | None:
        """Learn nothing."""
        return None

    def observe_step(
        self, num_rows: int, num_context_tokens: int, num_tokens: int, duration_s: float
    ) -> None:
        """Learn nothing."""

    def finish(self, key: Hashable, namespace: Namespace, tokens: TokenArray, num_known: int) -> None:
        """Keep nothing."""
