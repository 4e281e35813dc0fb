"""The instruments of one server together: a request is noted by all of them, and operators read them."""

from __future__ import annotations

from dataclasses import dataclass

from stemma.insight.divergence_window import DivergenceWindow
from stemma.server.observe.explain import Explainer
from stemma.server.observe.explanations import Explanations
from stemma.server.observe.metrics import ServerMetrics
from stemma.server.observe.prompt_parts import RecentPrompts
from stemma.server.observe.usage_ledger import UsageLedger
from stemma.server.observe.watches import Watches


@dataclass(frozen=True, slots=True)
class Instruments:
    """Shared by what runs requests and what shows them."""

    metrics: ServerMetrics
    watches: Watches
    ledger: UsageLedger
    explanations: Explanations
    explainer: Explainer
    divergences: DivergenceWindow
    recent: RecentPrompts
