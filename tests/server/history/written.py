"""Answers as a server keeps them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stemma.model.text.tokenizer import Tokenizer
from stemma.server.history.answers import Place, WrittenAnswer, scope_of
from stemma.types import as_tokens

SCOPE = scope_of("", "", "")


def written(tokenizer: Tokenizer, before: str, text: str, scope: bytes = SCOPE) -> WrittenAnswer:
    """Return an answer that wrote `text` behind `before`, one character a token."""
    pieces: Sequence[np.ndarray] = [tokenizer.encode(char, add_special_tokens=False) for char in text]
    return WrittenAnswer(Place.after(scope, before), as_tokens(()), np.concatenate(pieces))
