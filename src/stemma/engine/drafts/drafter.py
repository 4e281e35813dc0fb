"""The engine's drafter: asks a sequence's sources, picks the draft that pays most, learns from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from stemma.config.settings import SpeculationSettings
from stemma.engine.drafts.adaptive import Acceptance, AcceptanceTable, Probe, StepCost, best_length
from stemma.engine.drafts.index_memory import IndexMemory
from stemma.engine.drafts.lookahead import Lookahead
from stemma.engine.drafts.prompt_lookup import PromptLookup
from stemma.engine.drafts.source import DraftSource, Proposal, num_accepted
from stemma.engine.drafts.suffix import SuffixCorpus
from stemma.engine.drafts.tree import BranchLookup, Continuation, TreeContinuation
from stemma.prefix.keys import Namespace
from stemma.types import TokenArray

_FEW_SEQUENCES = 8
"""Up to here rows are nearly free on every machine measured, and asking costs less than a step's noise."""
_PROPOSE_WEIGHT = 0.05

SourceFactory = Callable[[Namespace], list[DraftSource]]


@dataclass(slots=True)
class _Speculation:
    """What is known of one running sequence."""

    namespace: Namespace
    sources: list[DraftSource]
    acceptance: dict[str, Acceptance]
    probe: Probe = field(default_factory=Probe)
    evidence: str = ""
    """Of the last draft."""


class Drafter:
    """Drafts for all running sequences. One owner, the step loop.

    Sequences are told apart by `key`; `finish` must be called for each that ends.
    """

    def __init__(
        self,
        make_sources: SourceFactory,
        settings: SpeculationSettings,
        corpus: SuffixCorpus,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._make_sources = make_sources
        self._settings = settings
        self._corpus = corpus
        self._table = AcceptanceTable()
        self._cost = StepCost()
        self._clock = clock
        self._propose_s = 0.0
        """What asking for one draft takes, a moving average."""
        self._batch_probe = Probe()
        self._running: dict[Hashable, _Speculation] = {}
        self.num_proposed_tokens = 0
        self.num_accepted_tokens = 0

    def begin_step(self, num_sequences: int) -> bool:
        """Return whether to ask for drafts in a step that decodes `num_sequences`.

        With many, a row costs nearly what a token is worth, and asking costs each of them host time: if even
        the evidence that holds most often doesn't pay for both, nobody is asked, but for a rare probe.
        """
        if not self._settings.adaptive or num_sequences < _FEW_SEQUENCES:
            return True
        most = self._settings.max_draft_tokens
        _, gain_s = best_length(self._table.best_probability, most, self._cost)
        return gain_s > self._propose_s or self._batch_probe.decline() > 0

    def propose(
        self, key: Hashable, namespace: Namespace, tokens: TokenArray, max_tokens: int
    ) -> tuple[int, ...]:
        """Return the draft to follow `tokens`, at most `max_tokens` long; empty where none pays."""
        start_s = self._clock()
        draft = self._propose(key, namespace, tokens, max_tokens)
        self._propose_s += _PROPOSE_WEIGHT * (self._clock() - start_s - self._propose_s)
        return draft

    def _propose(
        self, key: Hashable, namespace: Namespace, tokens: TokenArray, max_tokens: int
    ) -> tuple[int, ...]:
        speculation = self._running.get(key)
        if speculation is None:
            speculation = self._running[key] = _Speculation(
                namespace, self._make_sources(namespace), self._table.for_request()
            )
        most = min(max_tokens, self._settings.max_draft_tokens)
        best: Proposal | None = None
        best_tokens, best_gain = 0, 0.0
        for source in speculation.sources:
            proposal = source.propose(tokens, most)
            if proposal is None:
                continue
            num_tokens, gain = len(proposal.token_ids), 0.0
            if self._settings.adaptive:
                probability = speculation.acceptance[proposal.evidence].probability
                num_tokens, gain = best_length(probability, num_tokens, self._cost)
            if best is None or gain > best_gain:
                best, best_tokens, best_gain = proposal, num_tokens, gain
        if best is None:
            return ()
        if best_tokens == 0:
            best_tokens = speculation.probe.decline()
        speculation.evidence = best.evidence
        return best.token_ids[:best_tokens]

    def observe(self, key: Hashable, tokens: TokenArray, draft: Sequence[int], drawn: Sequence[int]) -> None:
        """Learn from a verified draft: ``drawn[j]`` was drawn after `tokens` and ``draft[:j]``."""
        speculation = self._running.get(key)
        if speculation is None or not draft:
            return
        num_held = num_accepted(draft, drawn)
        self.num_proposed_tokens += len(draft)
        self.num_accepted_tokens += num_held
        speculation.acceptance[speculation.evidence].observe(len(draft), num_held)
        if num_held:
            speculation.probe.succeed()
        for source in speculation.sources:
            source.observe(tokens, draft, drawn)

    def observe_step(
        self, num_rows: int, num_context_tokens: int, num_tokens: int, duration_s: float
    ) -> None:
        """Learn what a step costs: of decodes alone, with `num_rows` rows, giving `num_tokens` tokens."""
        self._cost.observe(num_rows, num_context_tokens, num_tokens, duration_s)

    def finish(self, key: Hashable, namespace: Namespace, tokens: TokenArray, num_known: int) -> None:
        """Forget a sequence that ended; its tokens from `num_known` on become drafts for others.

        `num_known`: leading tokens that came from the cache, thus from a sequence that is known already.
        """
        speculation = self._running.pop(key, None)
        for source in speculation.sources if speculation is not None else ():
            source.close()
        if self._settings.mode in ("auto", "tree"):
            self._corpus.add(namespace, tokens[num_known:])


def make_drafter(settings: SpeculationSettings, continuation: Continuation) -> Drafter | None:
    """Return the drafter that the settings ask for; None if speculation is off."""
    if settings.mode == "off":
        return None
    corpus, memory = SuffixCorpus(), IndexMemory()

    def sources(namespace: Namespace) -> list[DraftSource]:
        made: list[DraftSource] = []
        if settings.mode in ("auto", "tree"):
            made += [TreeContinuation(namespace, continuation), BranchLookup(namespace, corpus)]
        if settings.mode in ("auto", "prompt_lookup"):
            made.append(PromptLookup(memory))
        if settings.mode == "la":
            made.append(
                Lookahead(
                    memory,
                    level=settings.la_level,
                    window=settings.la_window,
                    guess_set_size=settings.la_guess_set_size,
                )
            )
        return made

    return Drafter(sources, settings, corpus)
