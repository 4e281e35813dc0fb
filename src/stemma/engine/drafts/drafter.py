"""The engine's drafter: asks a sequence's sources, picks the draft that pays most, learns from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from stemma.config.settings import SpeculationSettings
from stemma.engine.api import DraftCount
from stemma.engine.drafts.adaptive import PRIORS, Acceptance, AcceptanceTable, Probe, StepCost, best_length
from stemma.engine.drafts.index_memory import IndexMemory
from stemma.engine.drafts.lookahead import Lookahead
from stemma.engine.drafts.predicted import EVIDENCE, PassCost, Predicted, best_depth
from stemma.engine.drafts.prompt_lookup import PromptLookup
from stemma.engine.drafts.source import DraftSource, Proposal, num_accepted, source_of
from stemma.engine.drafts.suffix import SuffixCorpus
from stemma.engine.drafts.tree import BranchLookup, Continuation, TreeContinuation
from stemma.prefix.keys import Namespace
from stemma.types import TokenArray

_FEW_SEQUENCES = 8
"""Up to here rows are nearly free on every machine measured, and asking costs less than a step's noise."""
_PROPOSE_WEIGHT = 0.05
FORCED = "grammar"
"""The evidence of tokens that a grammar forces. Nothing is learned of it: they hold."""

SOURCES_OF: dict[str, tuple[str, ...]] = {
    "off": (),
    "auto": ("tree", "prompt_lookup"),
    "tree": ("tree",),
    "prompt_lookup": ("prompt_lookup",),
    "la": ("la",),
    "mtp": ("mtp", "tree", "prompt_lookup"),
}
"""The sources of each mode of `SpeculationSettings`."""

SourceFactory = Callable[[Namespace], list[DraftSource]]


@dataclass(slots=True)
class _Speculation:
    """The drafter's notes on one running sequence."""

    namespace: Namespace
    sources: list[DraftSource]
    acceptance: dict[str, Acceptance]
    predicted: Predicted = field(default_factory=Predicted)
    probe: Probe = field(default_factory=Probe)
    evidence: str = ""
    """Kind of evidence of the last draft."""
    found: list[Proposal] = field(default_factory=list)
    """Proposals of the sources, `found_at` tokens into the sequence, for drafts of up to `found_for`."""
    found_at: int = -1
    found_for: int = 0

    def probability(self, evidence: str) -> float:
        """Return how likely a token of such a draft is to hold."""
        return 1.0 if evidence == FORCED else self.acceptance[evidence].probability


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """A sequence for which the model may guess tokens."""

    key: Hashable
    namespace: Namespace
    tokens: TokenArray
    max_tokens: int


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
        sources = SOURCES_OF[settings.mode]
        self._table = AcceptanceTable(kind for kind in PRIORS if source_of(kind) in sources)
        self._cost = StepCost()
        self._clock = clock
        self._propose_s = 0.0
        """Seconds that asking for one draft takes, a moving average."""
        self._batch_probe = Probe()
        self._pass_probe = Probe()
        self._pass_cost = PassCost()
        self._running: dict[Hashable, _Speculation] = {}
        self.counts: dict[str, DraftCount] = {}
        """By source, one of `DRAFT_SOURCES`."""

    def begin_step(self, num_sequences: int, *, may_be_forced: bool = False) -> bool:
        """Return whether to ask for drafts in a step that decodes `num_sequences`.

        `may_be_forced`: a grammar may force tokens of one of them, which then hold for sure.
        With many, a row costs nearly what a token is worth, and asking costs each of them host time: if even
        the evidence that holds most often doesn't pay for both, nobody is asked, but for a rare probe.
        """
        if not self._settings.adaptive or num_sequences < _FEW_SEQUENCES:
            return True
        most = self._settings.max_draft_tokens
        probability = 1.0 if may_be_forced else self._table.best_probability
        _, gain_s = best_length(probability, most, self._cost)
        return gain_s > self._propose_s or self._batch_probe.decline() > 0

    def propose(
        self,
        key: Hashable,
        namespace: Namespace,
        tokens: TokenArray,
        max_tokens: int,
        forced: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Return the draft to follow `tokens`, at most `max_tokens` long; empty where none pays.

        `forced`: the tokens that are sure to follow, since a grammar leaves no choice.
        """
        start_s = self._clock()
        draft = self._propose(key, namespace, tokens, max_tokens, tuple(forced))
        self._propose_s += _PROPOSE_WEIGHT * (self._clock() - start_s - self._propose_s)
        return draft

    def _propose(
        self,
        key: Hashable,
        namespace: Namespace,
        tokens: TokenArray,
        max_tokens: int,
        forced: tuple[int, ...],
    ) -> tuple[int, ...]:
        speculation = self._speculation(key, namespace)
        most = min(max_tokens, self._settings.max_draft_tokens)
        predicted = speculation.predicted.take(len(tokens), most)
        proposals = self._find(speculation, tokens, most)
        if predicted is not None:
            proposals = [predicted, *proposals]
        if forced:
            # What doesn't begin with them is sure to fail.
            num = len(forced)
            proposals = [p for p in proposals if p.token_ids[:num] == forced[: len(p.token_ids)]]
            proposals.append(Proposal(forced, FORCED))
        best, best_tokens, _ = self._best(speculation, proposals, most)
        if best is None:
            return ()
        if best_tokens == 0 and predicted is not None:
            # The pass was a probe, which says something only if its guess is verified.
            best, best_tokens = predicted, len(predicted.token_ids)
        elif best_tokens == 0:
            best_tokens = speculation.probe.decline()
        speculation.evidence = best.evidence
        return best.token_ids[: min(best_tokens, most)]

    def _speculation(self, key: Hashable, namespace: Namespace) -> _Speculation:
        speculation = self._running.get(key)
        if speculation is None:
            speculation = self._running[key] = _Speculation(
                namespace, self._make_sources(namespace), self._table.for_request()
            )
        return speculation

    def _find(self, speculation: _Speculation, tokens: TokenArray, most: int) -> list[Proposal]:
        """Ask the sources, once for each state of the sequence."""
        if speculation.found_at != len(tokens) or speculation.found_for < most:
            found = [source.propose(tokens, most) for source in speculation.sources]
            speculation.found = [proposal for proposal in found if proposal is not None]
            speculation.found_at, speculation.found_for = len(tokens), most
        return speculation.found

    def _best(
        self, speculation: _Speculation, proposals: Sequence[Proposal], most: int
    ) -> tuple[Proposal | None, int, float]:
        """Return the proposal that pays most, how many of its tokens, and its gain in seconds."""
        best: Proposal | None = None
        best_tokens, best_gain = 0, 0.0
        for proposal in proposals:
            num_tokens, gain = min(len(proposal.token_ids), most), 0.0
            if self._settings.adaptive:
                probability = speculation.probability(proposal.evidence)
                num_tokens, gain = best_length(probability, num_tokens, self._cost)
            if best is None or gain > best_gain:
                best, best_tokens, best_gain = proposal, num_tokens, gain
        return best, best_tokens, best_gain

    def num_to_predict(self, asks: Sequence[DraftAsk]) -> list[int]:
        """Return how many tokens the model should guess for each sequence; 0: none.

        A pass of the model's own layer serves all sequences. It is run where what it gains beyond the drafts
        of the other sources exceeds the time it takes, and as a rare probe.
        """
        limits = [min(ask.max_tokens, self._settings.mtp_tokens) for ask in asks]
        running = [self._speculation(ask.key, ask.namespace) for ask in asks]
        if not self._settings.adaptive:
            return limits
        others = []
        for ask, speculation in zip(asks, running, strict=True):
            most = min(ask.max_tokens, self._settings.max_draft_tokens)
            others.append(self._best(speculation, self._find(speculation, ask.tokens, most), most)[2])
        probabilities = [one.acceptance[EVIDENCE].probability for one in running]
        depth, wanted = best_depth(probabilities, others, limits, self._cost, self._pass_cost.seconds)
        if depth:
            self._pass_probe.succeed()
            return [min(depth, limit) if wants else 0 for wants, limit in zip(wanted, limits, strict=True)]
        numbers = [0] * len(asks)
        if asks and self._pass_probe.decline():
            numbers[0] = min(1, limits[0])  # one row tells; the oldest sequence has the surest estimate
        return numbers

    def offer(self, key: Hashable, num_tokens: int, draft: Sequence[int]) -> None:
        """Take what the model guessed to follow the first `num_tokens` tokens of a sequence."""
        self._running[key].predicted.offer(num_tokens, draft)

    def observe_passes(self, num_passes: int, duration_s: float) -> None:
        """Learn what the passes of the model's own layer took that precede the step."""
        self._pass_cost.observe(num_passes, duration_s)

    def observe(
        self, key: Hashable, tokens: TokenArray, draft: Sequence[int], drawn: Sequence[int]
    ) -> str | None:
        """Learn from a verified draft: ``drawn[j]`` was drawn after `tokens` and ``draft[:j]``.

        Return its source, one of `DRAFT_SOURCES`; None if nothing is known of the draft.
        """
        speculation = self._running.get(key)
        if speculation is None or not draft:
            return None
        num_held = num_accepted(draft, drawn)
        source = source_of(speculation.evidence)
        self.counts[source] = self.counts.get(source, DraftCount()).plus(len(draft), num_held)
        if speculation.evidence != FORCED:
            speculation.acceptance[speculation.evidence].observe(len(draft), num_held)
        if num_held and speculation.evidence not in (EVIDENCE, FORCED):
            speculation.probe.succeed()
        for one in speculation.sources:
            one.observe(tokens, draft, drawn)
        return source

    def observe_step(
        self, num_rows: int, num_context_tokens: int, num_tokens: int, duration_s: float
    ) -> None:
        """Learn what a step costs: of decodes alone, with `num_rows` rows, giving `num_tokens` tokens."""
        duration_s -= self._pass_cost.take_pending()
        self._cost.observe(num_rows, num_context_tokens, num_tokens, duration_s)

    def finish(self, key: Hashable, namespace: Namespace, tokens: TokenArray, num_known: int) -> None:
        """Drop the state of a sequence that ended; its tokens from `num_known` on become drafts for others.

        `num_known`: leading tokens that came from the cache, thus from a sequence that is known already.
        """
        speculation = self._running.pop(key, None)
        for source in speculation.sources if speculation is not None else ():
            source.close()
        if "tree" in SOURCES_OF[self._settings.mode]:
            self._corpus.add(namespace, tokens[num_known:])


def make_drafter(settings: SpeculationSettings, continuation: Continuation) -> Drafter | None:
    """Return the drafter that the settings ask for; None if speculation is off."""
    if settings.mode == "off":
        return None
    corpus, memory, names = SuffixCorpus(), IndexMemory(), SOURCES_OF[settings.mode]

    def sources(namespace: Namespace) -> list[DraftSource]:
        made: list[DraftSource] = []
        if "tree" in names:
            made += [TreeContinuation(namespace, continuation), BranchLookup(namespace, corpus)]
        if "prompt_lookup" in names:
            made.append(PromptLookup(memory))
        if "la" in names:
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
