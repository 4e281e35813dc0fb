"""How much memory an answer may take, by what is asked for: known before any of it is computed.

The numbers are for CPython's objects and for JSON, which is made of them: measured, and rounded up. Each
token of an answer is taken to be the longest of the vocabulary: a prompt can ask for that. Log-probabilities
tell different tokens; only who steers an answer to chosen ones gets the longest there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from sys import getsizeof
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:  # proxies need budgets, and no torch
    from stemma.engine.api import GenerationRequest
    from stemma.model.text.tokenizer import Tokenizer
    from stemma.types import TokenArray

_CHOICE_BYTES = 4096
"""Of a choice without a token."""
_TOKEN_BYTES = 100
"""Of a token, beside what the length of its text adds."""
_LOGPROB_BYTES, _LONG_LOGPROB_BYTES = 400, 1600
"""Of one log-probability of a generated token: its own, or one of the likeliest."""
_PROMPT_LOGPROB_BYTES = 400
"""Of one log-probability of a prompt's token, told once."""
_ECHOED_LOGPROB_BYTES = 128
"""Of one that another choice repeats."""
ID_BYTES = 16
"""Of a token's id in a list of them."""
LISTED_ID_BYTES = 64
"""Of one in a list of Python's numbers."""
ENTRY_BYTES = 640
"""Of a token that is told as an object with its text and id."""
EVENT_BYTES = 256
"""Of an event of its own for a token."""
PARSED_BYTES = 16
"""Of a byte of stored JSON, once it is parsed."""
_RECEIPT_BYTES = 16_384
"""Of a receipt without ids."""
NUMBER_BYTES = 96
"""Of one of the numbers of a vector."""
_WIDEST = 4
"""Of a character of a text that holds any beyond U+FFFF."""
_AT_WORK = 3
"""Texts of one choice while it is read and written."""
_COPIES = 2
"""JSON grows in a buffer of up to twice its size."""


def text_bytes(text: str) -> int:
    """Return what a text takes that an answer repeats, as it is and as JSON."""
    return getsizeof(text) + len(orjson.dumps(text))


@dataclass(frozen=True, slots=True)
class TokenSize:
    """The most that a generated token takes, in bytes."""

    each: int
    """Its id, its text in a piece and in the whole answer, its part of the JSON."""
    text: int
    """Its part of one more text of an answer, which is as wide as its widest character."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenSize:
        """Return that of the longest token of a vocabulary."""
        longest = [
            (getsizeof(text) + _COPIES * len(orjson.dumps(text)), _WIDEST * len(text))
            for text in tokenizer.longest_texts
        ]
        most = max((piece + text for piece, text in longest), default=0)
        return cls(_TOKEN_BYTES + most, max((text for _, text in longest), default=0))


@dataclass(frozen=True, slots=True)
class PromptTold:
    """What an answer to one prompt tells beside the text and log-probabilities of its choices, in bytes."""

    once: int = 0
    each: int = 0
    """With each choice."""
    token: int = 0
    """With each generated token."""
    num_texts: int = 0
    """How often each choice's text is repeated."""
    repeats_logprobs: bool = False
    """Whether each choice repeats the prompt's log-probabilities."""


NOTHING_ELSE = PromptTold()


def told_ids(prompt: TokenArray) -> PromptTold:
    """Return that the ids of a prompt are told with each choice, and those of its tokens."""
    return PromptTold(each=ID_BYTES * len(prompt), token=ID_BYTES)


def told_signed(told: PromptTold, prompt: TokenArray) -> PromptTold:
    """Return `told` with a receipt, which has the ids of the prompt and of all its answers."""
    once = told.once + _RECEIPT_BYTES + LISTED_ID_BYTES * len(prompt)
    return replace(told, once=once, token=told.token + LISTED_ID_BYTES)


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """The most that an answer may take, in bytes, by the field that asks for it."""

    by_field: dict[str, int]

    @classmethod
    def of(
        cls, request: GenerationRequest, num_choices: int, num_tokens: int, told: PromptTold, token: TokenSize
    ) -> AnswerSize:
        """Return the size of the answer to `request`: `num_tokens` at most, over all choices.

        `token`: the most that one takes.
        """
        params, num_prompt = request.params, len(request.prompt_token_ids)
        is_steered = bool(params.allowed_token_ids or params.logit_bias)
        num_tops = 0 if params.logprobs is None else 1 + params.logprobs
        num_prompt_tops = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
        echoed = (num_choices - 1) * _ECHOED_LOGPROB_BYTES if told.repeats_logprobs else 0
        return cls(
            {
                "max_tokens": num_tokens * (token.each + told.num_texts * token.text)
                + _AT_WORK * token.text * num_tokens // max(1, num_choices),
                "logprobs": num_tokens * num_tops * (_LONG_LOGPROB_BYTES if is_steered else _LOGPROB_BYTES),
                "prompt_logprobs": num_prompt * num_prompt_tops * (_PROMPT_LOGPROB_BYTES + echoed),
                "prompt": _COPIES * (told.once + num_choices * told.each + num_tokens * told.token),
                "n": num_choices * _CHOICE_BYTES,
            }
        )

    @classmethod
    def sum(cls, sizes: list[AnswerSize]) -> AnswerSize:
        """Return that of an answer to several prompts."""
        fields = sizes[0].by_field if sizes else {}
        return cls({name: sum(one.by_field[name] for one in sizes) for name in fields})

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.by_field.values())

    @property
    def beside_text(self) -> int:
        """All but the choices' text, which the budget of tokens bounds: it grows no faster than their KV."""
        return self.num_bytes - self.by_field.get("max_tokens", 0)

    @property
    def largest(self) -> str:
        """The field that asks for most."""
        return max(self.by_field, key=self.by_field.__getitem__, default="n")
