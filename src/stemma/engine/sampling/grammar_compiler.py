"""From what a request asks for to a compiled `Grammar`, which can take 100 ms and more and is remembered.

The server compiles off the step loop.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from stemma.budgets import Budget
from stemma.engine.sampling.grammar import JSON_OPTIONS, Cutter, Grammar, GrammarSpec, MaskRoom
from stemma.engine.sampling.grammar_store import BASE_BYTES, GrammarStore, LexerSize
from stemma.engine.sampling.schemas import advice, rewritten
from stemma.errors import InvalidRequest, ModelError
from stemma.foreign_code import ForeignCode
from stemma.native.masks import masked_argmax_function

GRAMMAR_MEMORY = 256 * 2**20
MAX_LEXER_STATES = 40_000
"""Lexer states of one grammar, about 1 kB each (llguidance's default: 250,000)."""
INITIAL_LEXER_FUEL = 250_000
"""Expressions that the first mask of a grammar may make, about 80 bytes each (default: 1,000,000)."""


class GrammarCompiler:
    """Compiles the grammars of one model's requests and remembers the latest. Thread-safe.

    `hf_tokenizer` is the checkpoint's fast tokenizer, `vocab_size` the number of logits, `isa` the level of
    the kernels, `max_bytes` what grammars in use and remembered ones may hold.
    """

    def __init__(
        self,
        hf_tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        isa: str = "auto",
        *,
        max_bytes: int = GRAMMAR_MEMORY,
    ) -> None:
        self._hf_tokenizer = hf_tokenizer
        self._room = MaskRoom(vocab_size, masked_argmax_function(isa))
        self._eos_token_ids = list(eos_token_ids)
        self._cutter: Cutter | None = None
        self._store = GrammarStore(max_bytes)
        self._lock = threading.Lock()

    @property
    def budget(self) -> Budget:
        """The bound of compiled grammars."""
        return self._store.budget

    def compile(self, spec: GrammarSpec, owner: str = "") -> Grammar:
        """Return the grammar of `spec`, which is found again as long as it is used or remembered.

        `owner`: the tenant. Raises InvalidRequest, naming the field, if it is none, and RateLimited or
        Overloaded if those in use leave no room for it.
        """
        key = (owner, spec.kind, spec.text, spec.before)
        found: Grammar | None = self._store.find(key)
        if found is not None:
            return found
        self._store.make_room(BASE_BYTES, owner)
        with self._lock:
            cutter = self._load_tokenizer(spec.param)
        grammar = self._build(spec, cutter)
        self._store.keep(key, grammar)
        return grammar

    def _build(self, spec: GrammarSpec, cutter: Cutter) -> Grammar:
        from llguidance import LLMatcher

        try:
            source = _after(spec.before, _source(spec))
        except ValueError as error:
            raise InvalidRequest(f"{spec.param}: {error}", param=spec.param) from error
        matcher = LLMatcher(cutter.tokenizer, source, log_level=0, limits=_limits())
        _check(matcher, spec)
        grammar = Grammar(matcher, self._room, cutter, LexerSize(len(source)))
        # The first mask makes most of the lexer's states, which later ones share: not on the step loop.
        # Where it used up what the lexer may make, only the next one fails.
        room = np.zeros((self._room.vocab_size + 31) // 32, dtype=np.int32)
        for _ in range(2):
            first = matcher.deep_copy()
            grammar.size.compute_mask(first, room.ctypes.data, room.nbytes)
            _check(first, spec)
        return grammar

    def _load_tokenizer(self, param: str) -> Cutter:
        """Return llguidance's view of the vocabulary, made at the first request that needs it."""
        if self._cutter is None:
            from llguidance.hf import from_tokenizer

            try:
                with ForeignCode("this model's tokenizer can't be used for structured output"):
                    tokenizer = from_tokenizer(
                        self._hf_tokenizer,
                        n_vocab=self._room.vocab_size,
                        eos_token=self._eos_token_ids or None,
                    )
            except ModelError as error:
                raise InvalidRequest(str(error), param=param) from error
            self._cutter = Cutter(tokenizer)
        return self._cutter


@cache
def _limits() -> Any:
    """Return the bounds of what one grammar may hold."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=INITIAL_LEXER_FUEL, max_lexer_states=MAX_LEXER_STATES)


def _check(matcher: Any, spec: GrammarSpec) -> None:
    """Raise InvalidRequest with llguidance's reason if `matcher` has failed."""
    if matcher.is_error():
        reason = advice(" ".join(matcher.get_error().split("<state>")[0].split())[:500])
        raise InvalidRequest(f"{spec.param}: {reason}", param=spec.param)


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

    options: Any = JSON_OPTIONS
    return str(LLMatcher.grammar_from_json_schema(rewritten(schema), overrides=options))


def _after(before: str, source: str) -> str:
    """Return the grammar behind another, as llguidance's list of grammars that name each other."""
    if not before:
        return source
    is_lark = not source.startswith("{")
    first = {"lark_grammar": source} if is_lark else json.loads(source)["grammars"][0]
    whole = {"name": "whole", "lark_grammar": before}
    return json.dumps({"grammars": [whole, {**first, "name": "answer"}]})
