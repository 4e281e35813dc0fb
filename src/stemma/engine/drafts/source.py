"""The contract of a draft source: something that guesses how one sequence goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stemma.types import TokenArray


@dataclass(frozen=True, slots=True)
class Proposal:
    """A guess, and the kind of evidence behind it: acceptance is learned for each kind."""

    token_ids: tuple[int, ...]
    evidence: str


_SOURCES = {"branch": "tree", "lookup": "prompt_lookup", "pool": "la", "window": "la"}


def source_of(evidence: str) -> str:
    """Return the source whose kind of evidence this is, one of `DRAFT_SOURCES`."""
    kind = evidence.partition("-")[0]
    return _SOURCES.get(kind, kind)


class DraftSource(Protocol):
    """Guesses for one sequence; made anew for each, so it may follow the sequence as it grows."""

    def propose(self, tokens: TokenArray, max_tokens: int) -> Proposal | None:
        """Return up to `max_tokens` tokens that may follow `tokens` (prompt and output so far), or None.

        `tokens` only ever grows between two calls. The draft costs nothing but this call: no model runs.
        """

    def observe(self, tokens: TokenArray, draft: Sequence[int], drawn: Sequence[int]) -> None:
        """Learn from a verification: ``drawn[j]`` is what the model said after `tokens` and ``draft[:j]``.

        `tokens` are those that were there when the draft was made; `drawn` has one entry more than `draft`.
        """

    def close(self) -> None:
        """Free what it indexed: the sequence is over."""


def num_accepted(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many leading tokens of a draft hold, given what was drawn at each of its positions.

    A token is drawn at every position from the target's own distribution p there (penalties and filters
    included), and a draft token x holds if it is the one drawn; the first that isn't is replaced by the
    drawn token. For a draft without probabilities of its own this *is* speculative sampling (Leviathan et
    al., arXiv 2211.17192): x is accepted with probability p(x), and given a rejection the drawn token has the
    distribution p without x, renormalised. As the random number of a position is fixed (`sampler.py`),
    not only the distribution but the very tokens are those drawn without drafts.
    """
    for position, token_id in enumerate(draft):
        if drawn[position] != token_id:
            return position
    return len(draft)
