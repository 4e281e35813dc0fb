"""The replay report as one HTML file: tables, plots, and plotly's own code inside it (nothing is fetched)."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from stemma.errors import StorageError
from stemma_lab.replay import ReplayResult
from stemma_lab.report import ReportRow, name_of_size
from stemma_lab.statistics import (
    RatioSeries,
    hit_ratio_by_depth,
    hit_ratio_by_turn,
    hit_ratio_over_time,
    reuse_distances,
)
from stemma_lab.traces.columns import Trace

_PALETTE = ("#4053d3", "#ddb310", "#b51d14", "#00b25d", "#fb49b0", "#00beff", "#8c564b", "#7f7f7f", "#a05195")
_NEUTRAL, _GRID = "#76818c", "rgba(128,136,144,0.3)"


def write_replay_report(path: Path, trace: Trace, results: list[ReplayResult], rows: list[ReportRow]) -> None:
    """Write the report. Raises StorageError."""
    largest_gap = _most_telling_size(results, trace)
    at_size = [result for result in results if result.capacity_blocks == largest_gap]
    size_name = name_of_size(largest_gap)
    parts = [
        _heading(trace),
        _row_table(rows),
        figure_part(
            _ratio_by_size(trace, results),
            "Block hit ratio by cache size; <i>min</i> is the clairvoyant bound.",
        ),
        figure_part(
            _series_plot("time, s", at_size, [hit_ratio_over_time(trace, result) for result in at_size]),
            f"Hit ratio over time at {size_name} blocks.",
        ),
        figure_part(
            _series_plot(
                "block position", at_size, [hit_ratio_by_depth(trace, r) for r in at_size], log_x=True
            ),
            f"By depth in the prompt at {size_name} blocks.",
        ),
        figure_part(
            _series_plot("turn", at_size, [hit_ratio_by_turn(trace, r) for r in at_size]),
            f"By turn of the conversation at {size_name} blocks (inferred from prefixes unless recorded).",
        ),
        *_reuse_figures(trace),
    ]
    write_page(path, f"Replay of {trace.name}", parts)


def write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """Write a self-contained page of HTML parts. Raises StorageError."""
    page = (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<style>{_style()}</style><script>{get_plotlyjs()}</script></head><body>{''.join(parts)}</body></html>"
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"can't write {path}: {error}") from error


def _style() -> str:
    """Return the style that the dashboard has too."""
    return (files("stemma.insight.page") / "style.css").read_text(encoding="utf-8")


def figure_part(figure: Any, caption: str) -> str:
    """Return a plot with its caption as HTML; the page holds plotly once."""
    # Transparent, with a grey that reads on light and on dark paper: the page follows the reader's choice.
    figure.update_layout(
        template="plotly_white",
        height=420,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _NEUTRAL},
    )
    figure.update_xaxes(gridcolor=_GRID, zerolinecolor=_GRID)
    figure.update_yaxes(gridcolor=_GRID, zerolinecolor=_GRID)
    body = figure.to_html(full_html=False, include_plotlyjs=False)
    return f"<figure>{body}<figcaption>{caption}</figcaption></figure>"


def table_part(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return an HTML table."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in line) + "</tr>" for line in lines)
    return f"<table><tr>{head}</tr>{body}</table>"


def _heading(trace: Trace) -> str:
    span = float(trace.timestamps_s[-1])
    notes = "".join(f"<p>Note: {html.escape(caveat)}.</p>" for caveat in trace.caveats)
    return (
        f"<h1>Replay of {html.escape(str(trace.version))}</h1><p>Over {span:,.0f} s there are "
        f"{int(trace.input_tokens.sum()):,} prompt tokens in {trace.num_looked_up_blocks:,} blocks of "
        f"{trace.block_size} tokens, {trace.num_unique_blocks:,} of them distinct.</p>{notes}"
    )


def _row_table(rows: list[ReportRow]) -> str:
    header = (
        "policy",
        "blocks",
        "block hit ratio",
        "token hit ratio",
        "of the gap",
        "prefill saved, s",
        "cost saved",
    )
    lines = [
        (
            row.policy,
            name_of_size(row.capacity_blocks),
            f"{row.block_hit_ratio:.4f}",
            f"{row.token_hit_ratio:.4f}",
            "" if row.gap_closed is None else f"{row.gap_closed:.1%}",
            f"{row.prefill_s_saved:,.0f}",
            f"{row.cost_saved:,.2f}",
        )
        for row in rows
    ]
    return table_part(header, lines)


def _most_telling_size(results: list[ReplayResult], trace: Trace) -> int | None:
    """Return the capacity at which the policies differ most."""
    ratios: dict[int | None, list[float]] = {}
    for result in results:
        ratios.setdefault(result.capacity_blocks, []).append(result.block_hit_ratio(trace))
    return max(ratios, key=lambda size: max(ratios[size]) - min(ratios[size]))


def _ratio_by_size(trace: Trace, results: list[ReplayResult]) -> Any:
    figure = go.Figure()
    for number, policy in enumerate(dict.fromkeys(result.policy for result in results)):
        points = [
            (result.capacity_blocks or trace.num_unique_blocks, result.block_hit_ratio(trace))
            for result in results
            if result.policy == policy
        ]
        points.sort()
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            name=policy,
            mode="lines+markers",
            line={"color": _PALETTE[number % len(_PALETTE)]},
        )
    figure.update_xaxes(type="log", title="capacity, blocks")
    figure.update_yaxes(title="block hit ratio", rangemode="tozero")
    return figure


def _series_plot(
    title: str, results: list[ReplayResult], series: list[RatioSeries], *, log_x: bool = False
) -> Any:
    figure = go.Figure()
    for number, (result, values) in enumerate(zip(results, series, strict=True)):
        shown = values.num_blocks > 0
        figure.add_scatter(
            x=(values.labels[shown] + (1 if log_x else 0)).tolist(),
            y=values.ratios[shown].tolist(),
            name=result.policy,
            mode="lines+markers",
            line={"color": _PALETTE[number % len(_PALETTE)]},
        )
    figure.update_xaxes(title=title, type="log" if log_x else "linear")
    figure.update_yaxes(title="block hit ratio", rangemode="tozero")
    return figure


def _reuse_figures(trace: Trace) -> list[str]:
    reuse = reuse_distances(trace)
    share = reuse.num_first_uses / max(1, trace.num_blocks)
    by_distance = go.Figure(
        go.Bar(x=[f"< {edge:,}" for edge in reuse.edges_blocks[1:].tolist()], y=reuse.num_blocks.tolist())
    )
    by_distance.update_xaxes(title="distinct blocks since the previous use")
    by_distance.update_yaxes(title="reuses")
    by_gap = go.Figure(
        go.Bar(x=[f"{edge:.0f}" for edge in reuse.gap_edges_s[1:].tolist()], y=reuse.num_by_gap.tolist())
    )
    by_gap.update_xaxes(title="seconds since the previous use, up to", type="category")
    by_gap.update_yaxes(title="reuses")
    first = f"{share:.1%} of all block uses are the first: no cache can serve them."
    return [
        figure_part(by_distance, f"Reuse distance: an LRU cache of at least that size hits. {first}"),
        figure_part(by_gap, "Time between two uses of a block."),
    ]
