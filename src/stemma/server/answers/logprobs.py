"""Log-probabilities in the two shapes of OpenAI's API, and the answers that they make the best."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.observe.collected import CollectedSequence

TextOf = Callable[[int], str]
"""From a token's id to its text, special ones included."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of one byte in vocabularies that aren't byte-level."""
FLOOR = -9999.0
"""Stands for minus infinity, which JSON can't write."""


class TokenTexts:
    """The texts of a vocabulary's tokens, special ones included, looked up once each. A `TextOf`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """Return a token's text; part of a character is U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes, those of part of a character too."""
        text = self(token_id)
        if "\ufffd" not in text:
            return text.encode()
        if (known := self._tokenizer.token_bytes) is not None:
            return known[token_id]
        byte = _BYTE.fullmatch(self._tokenizer.token_text(token_id))
        return text.encode() if byte is None else bytes.fromhex(byte[1])


def chat_logprobs(texts: TokenTexts, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a chat completion, written token by token: what Python holds of one is
    many times its JSON."""
    content = bytearray()
    for entry in logprobs:
        item = _chat_entry(texts, entry.token_id, entry.logprob)
        item["top_logprobs"] = [_chat_entry(texts, token_id, value) for token_id, value in entry.top]
        content += b"," if content else b"["
        content += orjson.dumps(item)
    content += b"]" if content else b"[]"
    return {"content": orjson.Fragment(bytes(content)), "refusal": None}


def _chat_entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    found = list(texts.bytes_of(token_id))
    return {"token": texts(token_id), "logprob": max(logprob, FLOOR), "bytes": found}


class CompletionLogprobs:
    """Builds ``choices[].logprobs`` of a plain completion, piece by piece: offsets go on counting."""

    def __init__(self, text_of: TextOf, offset: int = 0) -> None:
        self._text_of = text_of
        self.offset = offset
        """Characters so far."""

    def render(self, logprobs: Iterable[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """Return the next piece. `first`: a token before it, which has no log-probability."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        text_of = self._text_of
        if first is not None:
            tokens, values, tops, offsets = [text_of(first)], [None], [None], [self.offset]
            self.offset += len(tokens[0])
        for entry in logprobs:
            text = text_of(entry.token_id)
            tokens.append(text)
            values.append(max(entry.logprob, FLOOR))
            tops.append({text_of(token_id): max(value, FLOOR) for token_id, value in entry.top})
            offsets.append(self.offset)
            self.offset += len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def keep_best(sequences: Sequence[CollectedSequence], n: int) -> Sequence[CollectedSequence]:
    """Return the `n` sequences with the highest mean log-probability per token, best first.

    If there are no more than `n`, they keep their order. A sequence without tokens comes last.
    """
    if len(sequences) <= n:
        return sequences
    return sorted(sequences, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(sequence: CollectedSequence) -> float:
    if not sequence.logprobs:
        return float("-inf")
    return sum(entry.logprob for entry in sequence.logprobs) / len(sequence.logprobs)
