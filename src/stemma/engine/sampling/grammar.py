"""Structured output: which tokens a grammar allows next. llguidance compiles and tracks the grammars.

A `GrammarSpec` is what a request asks for; `GrammarCompiler` turns it into a `Grammar`. Each sequence has a
`GrammarState`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from stemma.engine.sampling.grammar_store import LexerSize
from stemma.errors import InvalidRequest
from stemma.native.masks import MaskedArgmax

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_REMEMBERED_CUTS = 4096
MAX_CUT_BYTES = 64
"""Bytes of a forced text that are looked at at once: as many tokens as are drafted."""
SPECIAL_TOKEN_BYTE = 0xFF
"""Stands before a special token's number in llguidance's bytes; UTF-8 never has it."""
JSON_SPACE = r"\n? {0,16}"
"""White space between the parts of JSON: enough to indent eight levels by two. Without a bound, small models
write spaces for ever."""

JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": JSON_SPACE, "coerce_one_of": True}
"""How llguidance reads JSON schemas."""

AllowedTokens = npt.NDArray[np.bool_]
"""[V]: whether each token may come next."""
PackedMask = npt.NDArray[np.uint8]
"""[B]: the same, a bit for each token, lowest first; B is a multiple of 4."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A rule that an answer must follow.

    `text` is a JSON schema, a regular expression, a JSON list of strings (``choice``), a grammar in Lark's
    notation or in GBNF (``grammar``); it is empty for ``json_object``.
    """

    kind: GrammarKind
    text: str = ""
    before: str = ""
    """A grammar in Lark that ends with ``@answer``: what comes first, such as thinking. Empty: nothing."""
    param: str = "response_format"
    """The request's field, for error messages."""

    def __post_init__(self) -> None:
        """Raise InvalidRequest if the text is too long to compile."""
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"the grammar has {len(self.text)} characters; the limit is {MAX_GRAMMAR_CHARS}",
                param=self.param,
            )


class MaskRoom:
    """Room for one mask, used again and again by the step loop, and how the best that it allows is found."""

    def __init__(self, vocab_size: int, argmax: MaskedArgmax) -> None:
        self.vocab_size = vocab_size
        self.mask = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
        self.address = self.mask.ctypes.data
        self.argmax = argmax


class Cutter:
    """Cuts forced text into tokens: the same text always in the same way. Thread-safe.

    llguidance's own cut of what is forced depends on what the grammar allows behind it, so it would have to
    be made anew at each place. This one leaves out at the end what text behind it could change, and
    remembers the latest texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: llguidance's."""
        self.tokenizer = tokenizer
        self._cuts: dict[bytes, list[int]] = {}

    def cut(self, text: bytes) -> list[int]:
        """Return the tokens that `text` begins with, whatever follows it, as far as its first bytes say.

        Empty if the first token depends on what follows.
        """
        text = text[:MAX_CUT_BYTES]
        tokens = self._cuts.get(text)
        if tokens is None:
            tokens = self._cut(text)
            if len(self._cuts) >= MAX_REMEMBERED_CUTS:
                self._cuts = {}
            self._cuts[text] = tokens
        return tokens

    def _cut(self, text: bytes) -> list[int]:
        # Without one canonical cut nothing is forced, nor where text would have to spell a special token.
        if not self.tokenizer.is_canonical or SPECIAL_TOKEN_BYTE in text:
            return []
        tokens, _ = self.tokenizer.tokenize_partial(text)
        # A tokenizer that normalizes text spells another one, which the grammar needn't allow.
        return list(tokens) if text.startswith(self.tokenizer.decode_bytes(tokens)) else []


class GrammarState:
    """Where one sequence is in its grammar. Not thread-safe: the step loop's own.

    Beside the model's weights everything here is cold in the processor's caches, so calls count: a token that
    was found to be allowed is consumed at once, and `append` only confirms it. What else is asked first takes
    it back.

    What is asked about a place depends on the tokens before it alone, so draft tokens change no answer.
    """

    def __init__(self, grammar: Grammar, matcher: Any) -> None:
        """`matcher`: llguidance's, this sequence's own. The grammar is in use as long as this lives."""
        self._grammar = grammar
        self._matcher = matcher
        self._room = grammar.room
        self._cutter = grammar.cutter
        self._size = grammar.size
        self._vocab_size = grammar.room.vocab_size
        self._consumed: int | None = None
        """A token that isn't appended yet."""
        self._strays = False
        """Whether the last likeliest token was forbidden: then the next isn't asked for before the mask."""

    def packed(self, ahead: Sequence[int] = ()) -> PackedMask | None:
        """Return which tokens may follow the output and then `ahead` (draft tokens).

        None: `ahead` breaks the grammar or ends it, so nothing after it will be used.
        """
        if not self._go(ahead):
            return None
        mask = np.zeros((self._vocab_size + 31) // 32, dtype=np.int32)
        self._size.compute_mask(self._matcher, mask.ctypes.data, mask.nbytes)
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
        tokens = self._cut()
        self._go_back(ahead)
        return tokens

    def most_likely(self, logits: npt.NDArray[np.float32], ahead: Sequence[int], likeliest: int) -> int:
        """Return the most likely token that may follow the output and then `ahead`.

        `logits` [V], contiguous; `likeliest`: the most likely token of all, which is returned where nothing
        after `ahead` will be used. Models mostly follow a grammar that they were told of, so a mask is seldom
        computed.
        """
        if (ahead or self._consumed is not None) and not self._go(ahead):
            return likeliest
        matcher, room = self._matcher, self._room
        # What is forced is one token after another as the tokenizer cuts it, not any that would fit.
        forced = self._cut()
        if forced:
            self._go_back(ahead)
            return forced[0]
        keeps = not ahead and not matcher.is_stopped()
        if not self._strays and (matcher.try_consume_tokens if keeps else matcher.validate_tokens)(
            [likeliest]
        ):
            if keeps:
                self._consumed = likeliest
                return likeliest
            token = likeliest
        else:
            self._size.compute_mask(matcher, room.address, room.mask.nbytes)
            found = room.argmax(logits, room.mask)
            self._strays = found != likeliest
            token = likeliest if found < 0 else found
        if ahead:
            self._go_back(ahead)
        elif keeps and matcher.try_consume_tokens([token]):
            self._consumed = token
        return token

    def _cut(self) -> list[int]:
        """Return the forced tokens at the place where `_go` went."""
        text: bytes = self._matcher.compute_ff_bytes()
        return self._cutter.cut(text) if text else []

    def _go(self, ahead: Sequence[int]) -> bool:
        """Consume `ahead`; consume nothing and return False if the grammar doesn't allow all of it."""
        self._take_back()
        if not ahead:
            return True
        num_consumed = self._matcher.try_consume_tokens(list(ahead))
        if num_consumed < len(ahead):
            self._go_back(ahead[:num_consumed])
        return bool(num_consumed == len(ahead))

    def _go_back(self, ahead: Sequence[int]) -> None:
        if ahead:
            self._matcher.rollback(len(ahead))

    def _take_back(self) -> None:
        """Bring the matcher to the end of the output."""
        if self._consumed is not None:
            self._matcher.rollback(1)
            self._consumed = None

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids`, in order, the grammar allows next."""
        self._take_back()
        valid: int = self._matcher.validate_tokens(list(token_ids))
        return valid

    def append(self, token_id: int) -> bool:
        """Record a token of the output; return whether it was allowed.

        One that the grammar forbids ends the constraint (min_tokens may).
        """
        if token_id == self._consumed:
            self._consumed = None
            return True
        self._take_back()
        return not self._matcher.is_stopped() and bool(self._matcher.try_consume_tokens([token_id]))

    def append_text(self, text: bytes) -> bool:
        """Record what no whole tokens spell; return whether all of it was allowed."""
        if not text:
            return True
        tokens = self._cutter.tokenizer.tokenize_bytes(text)
        return bool(self._matcher.try_consume_tokens(tokens) == len(tokens))

    @property
    def is_over(self) -> bool:
        """Whether nothing but an end-of-sequence token can follow."""
        self._take_back()
        return bool(self._matcher.is_stopped())

    def copy(self) -> GrammarState:
        """Return an independent state at the same place, for a sequence that forks."""
        self._take_back()
        return GrammarState(self._grammar, self._matcher.deep_copy())


def unpack(mask: PackedMask, vocab_size: int) -> AllowedTokens:
    """Return a packed mask as a bool for each token."""
    return np.unpackbits(mask, bitorder="little")[:vocab_size].view(np.bool_)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Grammar:
    """A compiled grammar; many sequences may follow it."""

    matcher: Any
    """llguidance's, before the first token."""
    room: MaskRoom
    cutter: Cutter
    size: LexerSize

    @property
    def num_bytes(self) -> int:
        """An upper estimate of what it holds."""
        return self.size.num_bytes

    def start(self) -> GrammarState:
        """Return the state before the first token."""
        return GrammarState(self, self.matcher.deep_copy())
