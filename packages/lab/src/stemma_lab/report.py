"""Replay results as rows: for a terminal table and for JSON."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from stemma_lab.replay import BOUNDS, MIN_POLICY, ReplayResult
from stemma_lab.savings import PrefillModel, Prices
from stemma_lab.tiers import TierResult
from stemma_lab.traces.columns import Trace


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One policy at one capacity."""

    policy: str
    capacity_blocks: int | None
    block_hit_ratio: float
    token_hit_ratio: float
    gap_closed: float | None
    """Share of the way from LRU to the clairvoyant bound; None if either is unknown or they are equal."""
    prefill_s_saved: float
    cost_saved: float
    num_evicted: int
    elapsed_s: float
    tier_capacities: tuple[int, ...] = ()
    """With tiers below the device: blocks of each, the device first; `capacity_blocks` is the device's."""
    tier_hit_ratios: tuple[float, ...] = ()
    """Block hit ratio by tier; their sum is `block_hit_ratio`."""
    num_written: tuple[int, ...] = ()
    """Blocks written to each lower tier."""


def make_rows(
    trace: Trace, results: list[ReplayResult], model: PrefillModel, prices: Prices
) -> list[ReportRow]:
    """Return a row per result, in the same order."""
    ratios = {(result.policy, result.capacity_blocks): result.block_hit_ratio(trace) for result in results}
    rows = []
    for result in results:
        size = result.capacity_blocks
        tokens = int(result.hit_tokens(trace).sum())
        rows.append(
            ReportRow(
                policy=result.policy,
                capacity_blocks=size,
                block_hit_ratio=ratios[result.policy, size],
                token_hit_ratio=result.token_hit_ratio(trace),
                gap_closed=_gap_closed(
                    ratios[result.policy, size], ratios.get(("lru", size)), ratios.get((MIN_POLICY, size))
                ),
                prefill_s_saved=result.prefill_seconds_saved(trace, model),
                cost_saved=prices.saved(tokens),
                num_evicted=result.num_evicted,
                elapsed_s=result.elapsed_s,
            )
        )
    return rows


def make_tier_row(
    trace: Trace, result: TierResult, elapsed_s: float, model: PrefillModel, prices: Prices
) -> ReportRow:
    """Return the row of a replay through several tiers."""
    plan = result.plan
    tokens = result.hit_tokens(trace).sum(axis=1)
    return ReportRow(
        policy=plan.policy,
        capacity_blocks=plan.capacities[0],
        block_hit_ratio=sum(result.hit_ratios(trace)),
        token_hit_ratio=float(tokens.sum()) / max(1, int(trace.input_tokens.sum())),
        gap_closed=None,
        prefill_s_saved=float(model.seconds(np.zeros_like(tokens), tokens).sum()),
        cost_saved=prices.saved(int(tokens.sum())),
        num_evicted=0,
        elapsed_s=elapsed_s,
        tier_capacities=plan.capacities,
        tier_hit_ratios=result.hit_ratios(trace),
        num_written=result.num_written,
    )


def tier_table(
    trace: Trace, rows: list[ReportRow], sharing: str, admission: str, model: PrefillModel
) -> Table:
    """Return hit ratios by tier, a line per policy and device capacity."""
    all_s = float(model.seconds(0, trace.input_tokens).sum())
    table = Table(title=f"{trace.version}: {sharing}, admission {admission}", title_justify="left")
    table.add_column("policy")
    names = (
        "blocks of each tier",
        "block hit ratio",
        "by tier",
        "token hit ratio",
        "prefill a request",
        "blocks written down",
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.policy,
            " + ".join(f"{size:,}" for size in row.tier_capacities),
            f"{row.block_hit_ratio:.4f}",
            " + ".join(f"{ratio:.4f}" for ratio in row.tier_hit_ratios),
            f"{row.token_hit_ratio:.4f}",
            f"{(all_s - row.prefill_s_saved) / max(1, trace.num_requests):.3f} s",
            ", ".join(f"{num:,}" for num in row.num_written),
        )
    return table


def _gap_closed(ratio: float, lru: float | None, bound: float | None) -> float | None:
    if lru is None or bound is None or bound - lru < 1e-4:
        return None
    return (ratio - lru) / (bound - lru)


def hit_ratio_table(trace: Trace, rows: list[ReportRow]) -> Table:
    """Return block hit ratios, a line per policy and a column per capacity."""
    sizes = list(dict.fromkeys(row.capacity_blocks for row in rows))
    # Eight capacities fit in 80 columns; a cut ratio would say nothing, so more of them run over instead.
    table = Table(
        title=f"{trace.version}: block hit ratio",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True)
    for size in sizes:
        table.add_column(name_of_size(size), justify="right", no_wrap=True)
    by_key = {(row.policy, row.capacity_blocks): row for row in rows}
    best = {
        size: max(
            row.block_hit_ratio for row in rows if row.capacity_blocks == size and row.policy not in BOUNDS
        )
        for size in sizes
        if any(row.capacity_blocks == size and row.policy not in BOUNDS for row in rows)
    }
    for policy in dict.fromkeys(row.policy for row in rows):
        cells = []
        for size in sizes:
            row = by_key[policy, size]
            text = f"{row.block_hit_ratio:.4f}"
            cells.append(f"[bold]{text}[/bold]" if row.block_hit_ratio == best.get(size) else text)
        table.add_row(policy, *cells)
    return table


def savings_table(trace: Trace, rows: list[ReportRow], model: PrefillModel, prices: Prices) -> Table:
    """Return tokens, predicted prefill time and money saved, a line per policy and capacity."""
    total_tokens = int(trace.input_tokens.sum())
    total_s = float(model.seconds(0, trace.input_tokens).sum())
    title = (
        f"{trace.num_requests:,} requests, {total_tokens:,} prompt tokens: {total_s:,.0f} s of prefill at "
        f"{model.tokens_per_s:,.0f} tokens/s, {prices.bill(total_tokens, 0):,.2f} without a cache"
    )
    table = Table(title=title, title_justify="left")
    for name in (
        "policy",
        "blocks",
        "token hit ratio",
        "of the gap LRU to min",
        "prefill saved",
        "cost saved",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        gap = "" if row.gap_closed is None else f"{row.gap_closed:.1%}"
        table.add_row(
            row.policy,
            name_of_size(row.capacity_blocks),
            f"{row.token_hit_ratio:.4f}",
            gap,
            f"{row.prefill_s_saved:,.0f} s",
            f"{row.cost_saved:,.2f}",
        )
    return table


def name_of_size(capacity_blocks: int | None) -> str:
    """Return a capacity as the tables show it."""
    return "unlimited" if capacity_blocks is None else f"{capacity_blocks:,}"
