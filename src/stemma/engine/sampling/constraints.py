"""Tokens that a request forbids or favours: grammars, bias, allowed ids, bad words, a budget of thinking.

A `Constraints` belongs to one sequence and is asked for every row of its logits. Where a request's own rules
leave no token at all, they are ignored for that row: a sequence must be able to go on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from stemma.engine.sampling.calls import CallLimit
from stemma.engine.sampling.grammar import AllowedTokens, Grammar, GrammarState, PackedMask
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.thinking import ThinkingLimit

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BIAS_OF_BYTE: npt.NDArray[np.float32] = np.where(_BITS, 0.0, -np.inf).astype(np.float32)
"""[256, 8]: what a byte of a packed mask adds to the logits of its eight tokens."""


class _Scratch(threading.local):
    """Memory that is used again in each step: fresh memory of this size costs more than the work on it."""

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.float32]] = {}

    def get(self, name: str, size: int) -> npt.NDArray[np.float32]:
        """Return `size` floats of any content, valid until the next call with this name."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(size, dtype=np.float32)
        return buffer[:size]


_scratch = _Scratch()


def keep_allowed(logits: torch.Tensor, packed: Sequence[PackedMask]) -> torch.Tensor:
    """Return logits [R, V] float32 with minus infinity where the R packed masks forbid a token.

    On CPU the result is valid until the next call on this thread. Adding a bias that is looked up by the byte
    is ten times faster than filling by a mask of bool.
    """
    num_rows, vocab_size = logits.shape
    masks = np.stack(packed)
    bias = _scratch.get("bias", masks.size * 8).reshape(num_rows, -1, 8)
    np.take(_BIAS_OF_BYTE, masks, axis=0, out=bias, mode="clip")
    added = torch.from_numpy(bias.reshape(num_rows, -1)[:, :vocab_size])
    if logits.device.type != "cpu":
        return logits + added.to(logits.device)
    result = torch.from_numpy(_scratch.get("logits", num_rows * vocab_size).reshape(num_rows, vocab_size))
    return torch.add(logits, added, out=result)


class Constraints:
    """The tokens that one sequence may draw. Not thread-safe: the step loop's own."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        grammar: GrammarState | None,
        calls: Sequence[Grammar] = (),
    ) -> None:
        """`grammar`: where the request's begins; `calls`: the grammars of its rules for calls."""
        self._grammar = grammar
        self._calls = None if params.calls is None else CallLimit(params.calls, calls)
        self._vocab_size = vocab_size
        self._thinking: ThinkingLimit | None = None
        if params.thinking is not None and params.max_thinking_tokens is not None:
            self._thinking = ThinkingLimit(params.thinking, params.max_thinking_tokens)
        self.bias = {token: value for token, value in params.logit_bias if 0 <= token < vocab_size}
        """What is added to the logits of tokens."""
        self._bias_ids = torch.tensor(list(self.bias), dtype=torch.int64)
        self._bias_values = torch.tensor(list(self.bias.values()), dtype=torch.float32)
        self._only: AllowedTokens | None = None
        if params.allowed_token_ids:
            self._only = np.zeros(vocab_size, dtype=np.bool_)
            self._only[[token for token in params.allowed_token_ids if 0 <= token < vocab_size]] = True
        self._bad_words = params.bad_words
        self._num_kept = max((len(word) for word in self._bad_words), default=1) - 1
        self._output: list[int] = []
        """The last tokens of the output: as many as a bad word has before its last one."""

    @property
    def has_grammar(self) -> bool:
        """Whether the grammar decides where the output ends."""
        return self._grammar is not None

    @property
    def is_grammar_alone(self) -> bool:
        """Whether there is a grammar and no other rule."""
        has_others = (
            len(self._bias_ids) or self._bad_words or self._thinking is not None or self._calls is not None
        )
        return self._grammar is not None and not has_others

    def packed(self, ahead: Sequence[int]) -> PackedMask | None:
        """Return the grammar's mask after the output and then `ahead`; None where nothing there is used."""
        assert self._grammar is not None
        return self._grammar.packed(ahead)

    def bits(self, ahead: Sequence[int]) -> PackedMask | None:
        """Return which tokens may follow the output and then `ahead`, by whatever rule; None: all may."""
        if self.is_grammar_alone:
            return self.packed(ahead)
        allowed, end = self._allowed(ahead), self.forced_end(ahead)
        if end is not None:
            allowed = np.arange(self._vocab_size) == end
        if allowed is None:
            return None
        return np.packbits(np.pad(allowed, (0, -self._vocab_size % 32)), bitorder="little")

    def forced_end(self, ahead: Sequence[int]) -> int | None:
        """Return the only token that the budget of thinking leaves, whatever its logit; None: all."""
        return None if self._thinking is None else self._thinking.forced(ahead)

    def forced(self) -> list[int]:
        """Return the tokens that must follow the output because the grammar leaves no choice."""
        return self._grammar.forced() if self._grammar is not None and self.is_grammar_alone else []

    def most_likely(self, logits: npt.NDArray[np.float32], ahead: Sequence[int], likeliest: int) -> int:
        """Return the most likely token that the grammar allows after the output and then `ahead`.

        `logits` [V], `likeliest`: the most likely token of all. Only where `is_grammar_alone`.
        """
        assert self._grammar is not None
        return self._grammar.most_likely(logits, ahead, likeliest)

    def append(self, token_id: int) -> None:
        """Record a token of the output."""
        if self._grammar is not None:
            self._grammar.append(token_id)
        if self._thinking is not None:
            self._thinking.append(token_id)
        if self._calls is not None:
            self._calls.append(token_id)
        if self._num_kept:
            self._output = [*self._output, token_id][-self._num_kept :]

    def num_valid(self, draft: Sequence[int]) -> int:
        """Return how many tokens of `draft`, in order, the grammars and the budget of thinking allow next."""
        if self._thinking is not None:
            draft = draft[: self._thinking.num_valid(draft)]
        if self._calls is not None:
            draft = draft[: self._calls.num_valid(draft)]
        return len(draft) if self._grammar is None else self._grammar.num_valid(draft)

    def apply(self, logits: torch.Tensor, ahead: Sequence[int]) -> None:
        """Change `logits` [V] float32, which follow the output and then `ahead` (a draft), in place."""
        if (forced := self.forced_end(ahead)) is not None:
            logits.fill_(-torch.inf)
            logits[forced] = 0.0
            return
        if len(self._bias_ids):
            logits[self._bias_ids.to(logits.device)] += self._bias_values.to(logits.device)
        allowed = self._allowed(ahead)
        if allowed is not None and allowed.any():
            forbidden = torch.from_numpy(~allowed).to(logits.device)
            # A bias or a penalty may have made every allowed logit -inf already: then the rule is ignored.
            if bool(torch.isfinite(logits.masked_fill(forbidden, -torch.inf)).any()):
                logits.masked_fill_(forbidden, -torch.inf)

    def _allowed(self, ahead: Sequence[int]) -> AllowedTokens | None:
        rule = self._calls if self._grammar is None else self._grammar
        allowed = None if rule is None else rule.allowed(ahead)
        if self._only is not None:
            allowed = self._only
        bad = [word[-1] for word in self._bad_words if self._ends_with(word[:-1], ahead)]
        bad = [token for token in bad if 0 <= token < self._vocab_size]
        if not bad:
            return allowed
        kept = np.ones(self._vocab_size, dtype=np.bool_) if allowed is None else allowed.copy()
        kept[bad] = False
        return kept if kept.any() else allowed

    def _ends_with(self, words: Sequence[int], ahead: Sequence[int]) -> bool:
        if not words:
            return True
        text = [*self._output, *ahead]
        return text[-len(words) :] == list(words)
