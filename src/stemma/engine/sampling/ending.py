"""When tokens alone end a sequence: EOS, stop tokens, lengths. The one place that knows; samplers ask it.

Stop strings are found where text is made (`output/stopping.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stemma.engine.sampling.params import SamplingParams
from stemma.types import FinishReason


@dataclass(frozen=True, slots=True)
class EndingRule:
    """The rule of one request."""

    eos_token_ids: frozenset[int]
    """Empty where the request ignores them."""
    stop_token_ids: frozenset[int]
    min_tokens: int
    """Up to this number of output tokens only the length ends it. 0 under a grammar, which says where the
    output ends: nothing could be drawn beyond."""
    max_tokens: int
    """Most output tokens: what the request wants and the context leaves. 0: the prompt alone is wanted."""

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Collection[int], room: int) -> EndingRule:
        """Return the rule of a request whose context leaves `room` tokens for output."""
        return cls(
            frozenset(() if params.ignore_eos and params.grammar is None else eos_token_ids),
            frozenset(params.stop_token_ids),
            params.min_tokens if params.grammar is None else 0,
            max(1, room) if params.max_tokens is None else min(max(1, room), params.max_tokens),
        )

    def may_stop(self, num_output: int) -> bool:
        """Return whether EOS and stops end the sequence at output token `num_output`, from 1."""
        return num_output > self.min_tokens

    def is_end(self, token_id: int) -> bool:
        """Return whether this is an EOS or stop token."""
        return token_id in self.eos_token_ids or token_id in self.stop_token_ids

    def held_back(self, vocab_size: int) -> list[int]:
        """Return the ids below `vocab_size`, ascending, that can't be drawn before the sequence may stop."""
        if not self.min_tokens:
            return []
        return sorted(i for i in self.eos_token_ids | self.stop_token_ids if 0 <= i < vocab_size)

    def stop_reason(self, token_id: int) -> int | None:
        """Return what clients see as the stop reason: a stop token's id, None for EOS."""
        return None if token_id in self.eos_token_ids else token_id

    def cut(self, token_ids: Sequence[int], num_output: int) -> tuple[int, FinishReason | None]:
        """Return how many of the next tokens, after `num_output`, are taken, and why the last is the end.

        None: it doesn't.
        """
        for number, token_id in enumerate(token_ids, 1):
            reason = self.finish_reason(token_id, num_output + number)
            if reason is not None:
                return number, reason
        return len(token_ids), None

    def finish_reason(self, token_id: int, num_output: int) -> FinishReason | None:
        """Return why `token_id`, output token number `num_output` from 1, ends the sequence, or None."""
        if self.may_stop(num_output) and self.is_end(token_id):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= self.max_tokens else None
