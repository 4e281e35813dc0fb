"""The curves of the planner as one self-contained HTML file."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from stemma.config.sizes import format_size
from stemma_lab.html import figure_part, table_part, write_page
from stemma_lab.plan import NextGigabyte, Prediction, Workload

_MEASURES = (
    ("token hit ratio", "Hit ratio by the size of one tier, the others as planned."),
    ("time to first token, s", "Mean time to the first token, without queueing."),
    ("cost of the trace", "What the prompts cost at the stated prices."),
)


def write_plan_report(
    path: Path,
    workload: Workload,
    base: Prediction,
    gains: list[NextGigabyte],
    curves: dict[str, list[Prediction]],
) -> None:
    """Write the report. Raises StorageError."""
    header = ("tier", "size", "tokens", "token hit ratio")
    lines = [
        (
            tier.name,
            format_size(tier.capacity_bytes),
            f"{tier.capacity_bytes // workload.bytes_per_token:,}",
            f"{ratio:.4f}",
        )
        for tier, ratio in zip(base.tiers, base.token_hit_ratios, strict=True)
    ]
    next_header = ("one more GB of", "hit ratio", "prefill saved, s", "TTFT saved, ms")
    next_lines = [
        (
            gain.tier,
            f"{gain.token_hit_gain:+.4f}",
            f"{gain.prefill_s_saved:,.1f}",
            f"{1000 * gain.ttft_mean_s_saved:.2f}",
        )
        for gain in gains
    ]
    parts = [
        f"<h1>Plan for {html.escape(str(workload.trace.version))}</h1>",
        f"<p>{workload.bytes_per_token:,} bytes of KV a token; policy {workload.policy}, "
        f"{workload.sharing}, admission {workload.admission}.</p>",
        table_part(header, lines),
        table_part(next_header, next_lines),
        *(figure_part(_plot(base, curves, title), caption) for title, caption in _MEASURES),
    ]
    write_page(path, f"Plan for {workload.trace.name}", parts)


def _plot(base: Prediction, curves: dict[str, list[Prediction]], measure: str) -> Any:
    figure = go.Figure()
    for number, tier in enumerate(base.tiers):
        points = curves.get(tier.name, [])
        if points:
            figure.add_scatter(
                x=[point.tiers[number].capacity_bytes / 1e9 for point in points],
                y=[_value(point, measure) for point in points],
                name=tier.name,
                mode="lines+markers",
            )
    figure.update_xaxes(type="log", title="GB")
    figure.update_yaxes(title=measure, rangemode="tozero")
    return figure


def _value(point: Prediction, measure: str) -> float:
    if measure == _MEASURES[0][0]:
        return point.token_hit_ratio
    return point.ttft_mean_s if measure == _MEASURES[1][0] else point.cost
