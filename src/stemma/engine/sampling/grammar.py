"""Structured output: which tokens a grammar allows next. llguidance compiles and tracks the grammars.

A `GrammarSpec` is what a request asks for. `GrammarCompiler` turns it into a `Grammar`, which can take 100 ms
and more and is remembered; the server does that off the step loop. Each sequence has a `GrammarState`.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from stemma.errors import InvalidRequest

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
Reasoning = Literal["none", "optional", "opened"]
"""``optional``: the answer may begin with ``<think>``; ``opened``: the prompt ends with it."""
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_REMEMBERED_GRAMMARS = 128
JSON_SPACE = r"\n? {0,16}"
"""White space between the parts of JSON: enough to indent eight levels by two. Without a bound, small models
write spaces for ever."""

AllowedTokens = npt.NDArray[np.bool_]
"""[V]: whether each token may come next."""
PackedMask = npt.NDArray[np.uint8]
"""[B]: the same, a bit for each token, lowest first; B is a multiple of 4."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must look like.

    `text` is a JSON schema, a regular expression, a JSON list of strings (``choice``), a grammar in Lark's
    notation or in GBNF (``grammar``); it is empty for ``json_object``.
    """

    kind: GrammarKind
    text: str = ""
    reasoning: Reasoning = "none"
    """Whether free text up to ``</think>`` comes first."""
    param: str = "response_format"
    """The request's field, for error messages."""

    def __post_init__(self) -> None:
        """Raise InvalidRequest if the text is too long to compile."""
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"the grammar has {len(self.text)} characters; the limit is {MAX_GRAMMAR_CHARS}",
                param=self.param,
            )


class GrammarState:
    """Where one sequence is in its grammar. Not thread-safe: the step loop's own."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def packed(self, ahead: Sequence[int] = ()) -> PackedMask | None:
        """Return which tokens may follow the output and then `ahead` (draft tokens).

        None: `ahead` breaks the grammar or ends it, so nothing after it will be used.
        """
        if not self._go(ahead):
            return None
        mask = np.zeros((self._vocab_size + 31) // 32, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._go_back(ahead)
        return mask.view(np.uint8)

    def allowed(self, ahead: Sequence[int] = ()) -> AllowedTokens | None:
        """Return the same as `packed`, a bool for each token."""
        mask = self.packed(ahead)
        return None if mask is None else unpack(mask, self._vocab_size)

    def forced(self, ahead: Sequence[int] = ()) -> list[int]:
        """Return the tokens that must follow the output and then `ahead`, as far as there is no choice."""
        if not self._go(ahead):
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._go_back(ahead)
        return tokens

    def settle(self, ahead: Sequence[int], likeliest: int) -> int | None:
        """Return the most likely token that may follow the output and then `ahead`, where no mask is needed.

        That is `likeliest`, the most likely of the whole vocabulary, where it is allowed, or the forced one
        then; also where nothing after `ahead` will be used. None: it takes a mask to know.
        """
        if not self._go(ahead):
            return likeliest
        token: int | None = None
        if self._matcher.validate_tokens([likeliest]):
            # What is forced is one token after another as the tokenizer cuts it, not any that would fit.
            token = next(iter(self._matcher.compute_ff_tokens()), likeliest)
        self._go_back(ahead)
        return token

    def _go(self, ahead: Sequence[int]) -> bool:
        """Consume `ahead`; consume nothing and return False if the grammar doesn't allow all of it."""
        if not ahead:
            return True
        num_consumed = self._matcher.try_consume_tokens(list(ahead))
        if num_consumed < len(ahead):
            self._go_back(ahead[:num_consumed])
        return bool(num_consumed == len(ahead))

    def _go_back(self, ahead: Sequence[int]) -> None:
        if ahead:
            self._matcher.rollback(len(ahead))

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids`, in order, the grammar allows next."""
        valid: int = self._matcher.validate_tokens(list(token_ids))
        return valid

    def append(self, token_id: int) -> None:
        """Record a token of the output. One that the grammar forbids ends the constraint (min_tokens may)."""
        if not self._matcher.is_stopped():
            self._matcher.try_consume_tokens([token_id])

    @property
    def is_over(self) -> bool:
        """Whether nothing but an end-of-sequence token can follow."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> GrammarState:
        """Return an independent state at the same place, for a sequence that forks."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)


def unpack(mask: PackedMask, vocab_size: int) -> AllowedTokens:
    """Return a packed mask as a bool for each token."""
    return np.unpackbits(mask, bitorder="little")[:vocab_size].view(np.bool_)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar; many sequences may follow it."""

    _matcher: Any
    _vocab_size: int

    def start(self) -> GrammarState:
        """Return the state before the first token."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Compiles the grammars of one model's requests and remembers the latest. Thread-safe.

    `hf_tokenizer` is the checkpoint's fast tokenizer, `vocab_size` the number of logits.
    """

    def __init__(self, hf_tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._hf_tokenizer = hf_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: Any = None
        self._grammars: OrderedDict[tuple[str, str, str], Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Return the grammar of `spec`. Raises InvalidRequest, naming the field, if it is none."""
        key = (spec.kind, spec.text, spec.reasoning)
        with self._lock:
            grammar = self._grammars.get(key)
            if grammar is not None:
                self._grammars.move_to_end(key)
                return grammar
            tokenizer = self._llguidance_tokenizer(spec.param)
        grammar = self._build(spec, tokenizer)
        with self._lock:
            self._grammars[key] = grammar
            while len(self._grammars) > MAX_REMEMBERED_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _build(self, spec: GrammarSpec, tokenizer: Any) -> Grammar:
        from llguidance import LLMatcher

        try:
            source = _after_reasoning(_source(spec), spec.reasoning)
        except ValueError as error:
            raise InvalidRequest(f"{spec.param}: {error}", param=spec.param) from error
        matcher = LLMatcher(tokenizer, source, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:500]
            raise InvalidRequest(f"{spec.param}: {reason}", param=spec.param)
        return Grammar(matcher, self._vocab_size)

    def _llguidance_tokenizer(self, param: str) -> Any:
        """Return llguidance's view of the vocabulary, made at the first request that needs it."""
        if self._tokenizer is None:
            from llguidance.hf import from_tokenizer

            try:
                self._tokenizer = from_tokenizer(
                    self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
                )
            except (ValueError, RuntimeError) as error:
                raise InvalidRequest(
                    f"this model's tokenizer can't be used for structured output: {error}", param=param
                ) from error
        return self._tokenizer


def _source(spec: GrammarSpec) -> str:
    """Return the grammar in llguidance's form. Raises ValueError for text that is no grammar of its kind."""
    from llguidance import LLMatcher, grammar_from

    match spec.kind:
        case "json_object":
            source = _from_schema('{"type": "object"}')
        case "json_schema":
            source = _from_schema(spec.text)
        case "regex":
            source = LLMatcher.grammar_from_regex(spec.text)
        case "choice":
            choices = json.loads(spec.text)
            if not choices or not all(isinstance(choice, str) and choice for choice in choices):
                raise ValueError("the choices must be a list of non-empty strings")
            source = LLMatcher.grammar_from_regex("|".join(f"({re.escape(choice)})" for choice in choices))
        case "grammar":
            source = grammar_from("grammar", spec.text)
    return str(source)


def _from_schema(schema: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": JSON_SPACE}))


def _after_reasoning(source: str, reasoning: Reasoning) -> str:
    """Return the grammar with free text before it, as llguidance's list of grammars that name each other."""
    if reasoning == "none":
        return source
    begin = "think GAP" if reasoning == "opened" else '("<think>" think GAP)?'
    lark = f'start: {begin} @answer\nthink[suffix="</think>"]: /(?s:.*)/\nGAP: /\\s{{0,4}}/\n'
    answer = [{**grammar, "name": "answer"} for grammar in json.loads(source)["grammars"]]
    return json.dumps({"grammars": [{"name": "whole", "lark_grammar": lark}, *answer]})
