"""A report against its budgets, an earlier one, and prices."""

from __future__ import annotations

from dataclasses import dataclass

from stemma.errors import ConfigError
from stemma.insight.prices import PriceTable
from stemma_lab.lint.report import Finding, LintReport


@dataclass(frozen=True, slots=True)
class ReuseBudget:
    """What a set of prompts must keep."""

    min_reuse: float | None = None
    max_regression: float | None = None
    """Of the reuse, against the earlier set's, as a difference of shares."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Money of a month's prompts."""

    currency: str
    now: float
    wasted: float
    """That the findings cost."""


@dataclass(frozen=True, slots=True)
class LintVerdict:
    """All that a report tells."""

    report: LintReport
    before: LintReport | None = None
    cost: Cost | None = None
    misses: tuple[str, ...] = ()
    """Budgets that were missed, in words."""

    def cost_of(self, finding: Finding) -> float | None:
        """Return what a finding costs by month."""
        if self.cost is None or not self.report.lost_tokens:
            return None
        return self.cost.wasted * finding.lost_tokens / self.report.lost_tokens


def judged(
    report: LintReport, before: LintReport | None, budget: ReuseBudget, cost: Cost | None = None
) -> LintVerdict:
    """Return the verdict on a report."""
    misses = []
    if budget.min_reuse is not None and report.reuse < budget.min_reuse:
        misses.append(f"{report.reuse:.1%} of the tokens are shared, less than {budget.min_reuse:.1%}")
    if budget.max_regression is not None:
        if before is None:
            raise ConfigError("--max-regression needs --before: the prompts to compare with")
        regression = before.reuse - report.reuse
        if regression > budget.max_regression:
            misses.append(
                f"shared tokens fell from {before.reuse:.1%} to {report.reuse:.1%}, by more than "
                f"{budget.max_regression:.1%}"
            )
    return LintVerdict(report, before, cost, tuple(misses))


def monthly_cost(report: LintReport, prices: PriceTable, requests_per_month: float) -> Cost:
    """Return what such prompts cost by month. Raises ConfigError if their model has no price."""
    model = report.models[0] if len(report.models) == 1 else ""
    missed = report.num_tokens - report.num_shared_tokens
    now = prices.cost(model, report.num_shared_tokens, missed, 0)
    wasted = prices.saved(model, report.lost_tokens)
    if now is None or wasted is None:
        raise ConfigError(f"the prices name neither the model {model!r} nor a default")
    months = requests_per_month / max(1, report.num_prompts)
    return Cost(prices.currency, now * months, wasted * months)
