"""The bench as one HTML page that needs nothing beside it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from stemma_lab.bench import NUM_SAMPLES, BenchRow, Interval
from stemma_lab.html import figure_part, table_part, write_page
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Trace

_HEADER = (
    "policy",
    "blocks",
    "block hit ratio",
    "95 %",
    "prefill left, s",
    "95 %",
    "saved beside LRU",
    "95 %",
)


def write_bench_page(
    path: Path, traces: Sequence[Trace], rows: Sequence[BenchRow], model: PrefillModel, command: str
) -> None:
    """Write the page. `command` makes it again. Raises StorageError."""
    parts = [_heading(model, command)]
    for trace in traces:
        mine = [row for row in rows if row.trace == trace.version]
        parts.append(
            f"<h2>{html.escape(str(trace.version))}</h2><p>"
            f"{int(trace.input_tokens.sum()):,} prompt tokens, {trace.num_unique_blocks:,} distinct blocks "
            f"of {trace.block_size} tokens.</p>"
        )
        parts += [f"<p>Note: {html.escape(caveat)}.</p>" for caveat in trace.caveats]
        parts.append(figure_part(_figure(mine), "Block hit ratio by cache size, with 95 % intervals."))
        parts.append(table_part(_HEADER, map(_line, mine)))
    write_page(path, "Eviction policies", parts)


def _heading(model: PrefillModel, command: str) -> str:
    return (
        "<h1>Eviction policies</h1><p>Replays through Stemma's index; <i>min</i> is the clairvoyant bound. "
        f"Prefill: {model.tokens_per_s:,.0f} tokens a second, attention equal to the weights at position "
        f"{model.attention_equal_at:,.0f}. Intervals: {NUM_SAMPLES:,} draws of whole sessions (of slices of "
        f"time where a trace has none), the same for all policies.</p><pre>{html.escape(command)}</pre>"
    )


def _line(row: BenchRow) -> tuple[str, ...]:
    return (
        row.policy,
        f"{row.capacity_blocks:,}",
        f"{row.hit_ratio.value:.4f}",
        f"{row.hit_ratio.low:.4f} to {row.hit_ratio.high:.4f}",
        f"{row.prefill_s.value:,.1f}",
        f"{row.prefill_s.low:,.1f} to {row.prefill_s.high:,.1f}",
        f"{row.saved.value:+.1%}",
        f"{row.saved.low:+.1%} to {row.saved.high:+.1%}",
    )


def _figure(rows: Sequence[BenchRow]) -> Any:
    figure = go.Figure()
    for policy in dict.fromkeys(row.policy for row in rows):
        mine = [row for row in rows if row.policy == policy]
        ratios: list[Interval] = [row.hit_ratio for row in mine]
        figure.add_scatter(
            x=[row.capacity_blocks for row in mine],
            y=[ratio.value for ratio in ratios],
            error_y={
                "array": [ratio.high - ratio.value for ratio in ratios],
                "arrayminus": [ratio.value - ratio.low for ratio in ratios],
            },
            name=policy,
            mode="lines+markers",
        )
    figure.update_xaxes(type="log", title="blocks")
    figure.update_yaxes(title="block hit ratio", range=[0, 1])
    return figure
