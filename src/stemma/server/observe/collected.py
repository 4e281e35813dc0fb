"""What the engine says of one prompt, put together once, and the contract of those who look at it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stemma.engine.api import CacheReport, DraftCount, RequestOutput
from stemma.engine.pooling import Vector
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.prompt_logprobs import PromptLogprobs
from stemma.types import FinishReason


@dataclass(slots=True)
class CollectedSequence:
    """One sequence, as far as it has come."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """All pieces joined."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Collected:
    """All that the engine said about one prompt so far."""

    cache: CacheReport
    """As exact as its client may see it."""
    exact: CacheReport
    """As the server knows it."""
    keeps_logprobs: bool = True
    """False where they are sent as they come."""
    sequences: list[CollectedSequence] = field(default_factory=list)
    num_generated_tokens: int = 0
    num_held_tokens: int = 0
    """Tokens that were computed and never told, once it is over."""
    queue_wait_s: float = 0.0
    load_s: float = 0.0
    prompt_logprobs: PromptLogprobs | None = None
    pooled: Vector | None = None
    """The vector of a prompt that was asked for instead of an answer."""
    drafts: Mapping[str, DraftCount] = field(default_factory=dict)
    is_finished: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    """What else the answer's ``stemma`` object says, by observers."""

    @classmethod
    def nothing(cls, num_prompt_tokens: int, *, keeps_logprobs: bool = True) -> Collected:
        """Return what is known before the first output."""
        cache = CacheReport(num_prompt_tokens)
        return cls(cache, cache, keeps_logprobs)

    def take(self, output: RequestOutput) -> None:
        """Add an output, but for its cache report."""
        self.num_generated_tokens = output.num_generated_tokens
        self.queue_wait_s = output.queue_wait_s
        self.load_s = output.load_s
        self.prompt_logprobs = output.prompt_logprobs
        self.pooled = output.pooled
        self.drafts = output.drafts
        self.is_finished = output.finished
        for delta in output.deltas:
            while len(self.sequences) <= delta.index:
                self.sequences.append(CollectedSequence())
            sequence = self.sequences[delta.index]
            sequence.pieces.append(delta.text)
            sequence.token_ids.extend(delta.token_ids)
            if self.keeps_logprobs and delta.logprobs:
                sequence.logprobs.extend(delta.logprobs)
            if delta.finish_reason is not None:
                sequence.finish_reason = delta.finish_reason
                sequence.stop_reason = delta.stop_reason


class TurnObserver:
    """Learns of one turn, from its arrival to its end. Used on the event loop only; what it doesn't need of
    these it leaves as it is."""

    def began(self, so_far: Collected) -> None:
        """The first output is there: what was reused is known."""

    def spoke(self, so_far: Collected) -> None:
        """The first token is there."""

    async def finished(self, so_far: Collected) -> None:
        """The answer is whole; its client gets the end of it once this has returned."""

    def ended(self, so_far: Collected, outcome: str) -> None:
        """It is over: ``ok``, ``error``, ``refused`` or ``aborted``. Called exactly once."""


class Observers(TurnObserver):
    """Those of one turn, in their order, as one."""

    def __init__(self, observers: Iterable[TurnObserver | None]) -> None:
        """None: one that has nothing to see there."""
        self._all = [one for one in observers if one is not None]
        kinds = ("began", "spoke", "finished", "ended")
        plain = {kind: getattr(TurnObserver, kind) for kind in kinds}
        self._of = {
            kind: [one for one in self._all if getattr(type(one), kind) is not plain[kind]] for kind in kinds
        }
        """Who looks at what."""

    def began(self, so_far: Collected) -> None:
        """Tell each."""
        for one in self._of["began"]:
            one.began(so_far)

    def spoke(self, so_far: Collected) -> None:
        """Tell each."""
        for one in self._of["spoke"]:
            one.spoke(so_far)

    async def finished(self, so_far: Collected) -> None:
        """Tell each."""
        for one in self._of["finished"]:
            await one.finished(so_far)

    def ended(self, so_far: Collected, outcome: str) -> None:
        """Tell each."""
        for one in self._of["ended"]:
            one.ended(so_far, outcome)
