"""The state that a sequence's next token depends on beside its logits."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from stemma.engine.sampling.constraints import Constraints
from stemma.engine.sampling.ending import EndingRule
from stemma.engine.sampling.grammar import Grammar, GrammarState
from stemma.engine.sampling.params import SamplingParams

_UNIFORMS_PER_CHUNK = 64
_MASK_64 = (1 << 64) - 1
_NO_NUMBERS: npt.NDArray[np.float64] = np.empty(0)
_NO_IDS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
_NO_COUNTS: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)


def _fresh_seed() -> int:
    return secrets.randbits(64)


class SamplingState:
    """The state of one sequence's draws: counts, position and random numbers.

    `index` tells the `n` sequences of a request apart: each has its own random numbers. `ending` says which
    tokens can't be drawn yet; None: that of `params` for a model without EOS tokens. An unseeded request
    takes its seed from `seed_source`, at its first draw. `grammar` is where `params.grammar` begins,
    `calls` are the grammars of `params.calls`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.int32],
        vocab_size: int,
        *,
        index: int = 0,
        ending: EndingRule | None = None,
        seed_source: Callable[[], int] = _fresh_seed,
        grammar: GrammarState | None = None,
        calls: Sequence[Grammar] = (),
    ) -> None:
        self.params = params
        self.constraints = Constraints(params, vocab_size, grammar, calls) if params.constrained else None
        self.num_output_tokens = 0
        self._seed, self._seed_source, self._index = params.seed, seed_source, index
        self._chunk = -1
        self._uniforms = _NO_NUMBERS
        self._ending = ending or EndingRule.of(params, (), vocab_size)
        self._end_ids = self._ending.held_back(vocab_size)
        self.has_penalties = (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )
        has_rules = self.has_penalties or bool(self._end_ids)
        is_free = self.constraints is None or self.constraints.is_grammar_alone
        self.takes_likeliest = params.greedy and is_free and not has_rules and params.logprobs is None
        """Whether it takes the most likely token, of those that a grammar allows if there is one, and reports
        nothing of the others."""
        self._slots: dict[int, int] = {}
        self._ids, self._counts = _NO_IDS, _NO_COUNTS
        if self.has_penalties:
            seen = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
            seen = seen[(seen >= 0) & (seen < vocab_size)]
            self._slots = {int(token): slot for slot, token in enumerate(seen)}
            self._ids = seen
            self._counts = np.zeros(len(seen), dtype=np.float32)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Record tokens of the output."""
        if self.constraints is None and not self.has_penalties:
            self.num_output_tokens += len(token_ids)
            return
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Record a token of the output."""
        self.num_output_tokens += 1
        if self.constraints is not None:
            self.constraints.append(token_id)
        if not self.has_penalties:
            return
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot >= len(self._ids):
                spare = np.zeros(max(64, len(self._ids)), dtype=np.int64)
                self._ids = np.concatenate([self._ids, spare])
                self._counts = np.concatenate([self._counts, spare.astype(np.float32)])
            self._ids[slot] = token_id
        self._counts[slot] += 1.0

    def token_counts(self, ahead: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the distinct ids of prompt and output and how often each is in the output.

        `ahead` are tokens that are taken to follow the output (a draft).
        """
        num = len(self._slots)
        if not ahead:
            return self._ids[:num], self._counts[:num]
        extra = [token for token in dict.fromkeys(ahead) if token not in self._slots]
        ids = np.concatenate([self._ids[:num], np.array(extra, dtype=np.int64)])
        counts = np.concatenate([self._counts[:num], np.zeros(len(extra), dtype=np.float32)])
        new_slots = {token: num + i for i, token in enumerate(extra)}
        for token in ahead:
            counts[new_slots[token] if token in new_slots else self._slots[token]] += 1.0
        return ids, counts

    @property
    def needs_host(self) -> bool:
        """Whether the next draw depends on what was drawn before, beyond the logits."""
        return self.has_penalties or self.constraints is not None

    def num_valid(self, draft: Sequence[int]) -> int:
        """Return how many tokens of `draft`, in order, could be drawn at all."""
        return len(draft) if self.constraints is None else self.constraints.num_valid(draft)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar says what may follow."""
        return self.constraints is not None and self.constraints.has_grammar

    def forced(self) -> list[int]:
        """Return the tokens that must follow the output because a grammar leaves no choice."""
        return [] if self.constraints is None else self.constraints.forced()

    def masked_ids(self, position: int) -> Sequence[int]:
        """Return the ids that may not be drawn as output token number `position` (from 0)."""
        return () if self._ending.may_stop(position + 1) else self._end_ids

    def uniform(self, position: int) -> float:
        """Return the random number in [0, 1) of output token number `position` (from 0)."""
        chunk, offset = divmod(position, _UNIFORMS_PER_CHUNK)
        if chunk != self._chunk:
            if self._seed is None:
                self._seed = self._seed_source()
            key = np.array([self._seed & _MASK_64, self._index], dtype=np.uint64)
            generator = np.random.Generator(np.random.Philox(counter=[0, 0, 0, chunk], key=key))
            self._uniforms = generator.random(_UNIFORMS_PER_CHUNK)
            self._chunk = chunk
        return float(self._uniforms[offset])
