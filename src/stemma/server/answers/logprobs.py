"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stemma.engine.sampling.logprobs import TokenLogprob

TextOf = Callable[[int], str]
"""From a token's id to its text, special ones included."""
FLOOR = -9999.0
"""Stands for minus infinity, which JSON can't write."""


def chat_logprobs(text_of: TextOf, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a chat completion."""
    content = []
    for entry in logprobs:
        item = _chat_entry(text_of, entry.token_id, entry.logprob)
        item["top_logprobs"] = [_chat_entry(text_of, token_id, value) for token_id, value in entry.top]
        content.append(item)
    return {"content": content, "refusal": None}


def _chat_entry(text_of: TextOf, token_id: int, logprob: float) -> dict[str, Any]:
    text = text_of(token_id)
    return {"token": text, "logprob": max(logprob, FLOOR), "bytes": list(text.encode())}


class CompletionLogprobs:
    """Builds ``choices[].logprobs`` of a plain completion, piece by piece: offsets go on counting."""

    def __init__(self, text_of: TextOf, offset: int = 0) -> None:
        self._text_of = text_of
        self._offset = offset

    def render(self, logprobs: Iterable[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """Return the next piece. `first`: a token before it, which has no log-probability."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        text_of = self._text_of
        if first is not None:
            tokens, values, tops, offsets = [text_of(first)], [None], [None], [self._offset]
            self._offset += len(tokens[0])
        for entry in logprobs:
            text = text_of(entry.token_id)
            tokens.append(text)
            values.append(max(entry.logprob, FLOOR))
            tops.append({text_of(token_id): max(value, FLOOR) for token_id, value in entry.top})
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
