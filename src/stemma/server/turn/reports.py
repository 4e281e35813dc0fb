"""What is told of a request's cache: exact to the server, and to its client as exact as it may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from stemma.engine.api import CacheReport, PromptProgress
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.history.following import HistoryReport
from stemma.server.history.preparing import TurnPreparer
from stemma.server.observe.explain import Explainer
from stemma.server.observe.explanations import Explanation
from stemma.server.turn.build import Turn
from stemma.types import Tier


@dataclass(frozen=True, slots=True)
class Reports:
    """Those of one server."""

    tokenizer: Tokenizer
    preparer: TurnPreparer
    explainer: Explainer
    rounded_to: int | None
    """Clients see cached tokens rounded down to a multiple of this; None: as they are."""

    def of(self, turn: Turn) -> TurnReports:
        """Return those of one turn."""
        return TurnReports(self, turn)

    def rounded(self, progress: PromptProgress) -> PromptProgress:
        """Return how far a prompt has come, as exact as its client may know it."""
        size = self.rounded_to or 1
        num_cached = progress.num_cached_tokens // size * size
        return replace(
            progress,
            num_cached_tokens=num_cached,
            num_processed_tokens=max(num_cached, progress.num_processed_tokens // size * size),
        )


class TurnReports:
    """The reports of one turn, which are made anew only if the engine's changes."""

    def __init__(self, reports: Reports, turn: Turn) -> None:
        self._reports = reports
        self._turn = turn
        self._history = HistoryReport(
            reports.tokenizer,
            turn.request,
            turn.asked.prompt.history,
            partial(reports.preparer.num_used, turn.request),
        )
        self.last: CacheReport | None = None
        """The engine's report that was taken last."""

    @property
    def has_begun(self) -> bool:
        """Whether there was one."""
        return self.last is not None

    async def take(self, cache: CacheReport) -> tuple[CacheReport, CacheReport]:
        """Return the exact report, and the one for the client, explained if it asked for that."""
        self.last = cache
        exact = self._history.of(cache)
        size = self._reports.rounded_to
        shown = exact if size is None else _rounded(exact, size)
        if not self._turn.is_explained:
            return exact, shown
        note = Explanation.of(self._turn.request, shown, self._turn.caller.x_request_id)
        # Only a tenant has namespaces of its own, whose texts are the client's.
        quotes = bool(self._turn.caller.tenant)
        return exact, await self._reports.explainer.explained(note, quotes_cached=quotes)


def _rounded(cache: CacheReport, size: int) -> CacheReport:
    """Return `cache` with cached tokens rounded down to multiples of `size`."""
    whole = cache.num_cached_tokens // size * size
    by_tier: dict[Tier, int] = {}
    left = whole
    for tier, count in sorted(cache.cached_by_tier.items(), key=lambda item: item[1], reverse=True):
        by_tier[tier] = min(count // size * size, left)
        left -= by_tier[tier]
    return CacheReport(
        cache.num_prompt_tokens,
        by_tier,
        cache.miss_reason,
        num_public_tokens=min(cache.num_public_tokens, whole),
        num_exact_history_tokens=cache.num_exact_history_tokens // size * size,
        num_prepared_tokens=cache.num_prepared_tokens // size * size,
    )
