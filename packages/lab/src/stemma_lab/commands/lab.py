"""`stemma lab`: `bench` compares eviction policies on public traces; `fleet` is beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stemma.cli.json_file import write_json
from stemma.cli.progress import StepCounter, open_progress
from stemma.errors import ConfigError
from stemma_lab.bench import BenchRow, bench, sizes_of
from stemma_lab.commands import lab_fleet
from stemma_lab.commands.replay import load_trace, parse_capacities, parse_policies
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Trace

app = typer.Typer(
    help="Compare eviction policies on traces; run the router before simulated servers.", no_args_is_help=True
)

PUBLIC = ("agents", "conversation")
"""Traces in the package; their README names source and licence."""
ALL = "lru,hazard,arc,fifo,gdsf,lfu,s3fifo,sieve,min"
_WIDEST_TABLE = 1000
_SHARES = (0.02, 0.05, 0.1, 0.25)


app.command("fleet")(lab_fleet.command)


@app.command("bench")
def bench_command(
    traces: Annotated[
        list[str] | None,
        typer.Argument(help=f"Files, or names of traces in the package: {', '.join(PUBLIC)}."),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Policies, comma-separated; FILE.py:CLASS is one of your own.")
    ] = ALL,
    capacity: Annotated[
        str | None,
        typer.Option(help="Cache sizes in blocks; default: 2, 5, 10 and 25 % of a trace's distinct blocks."),
    ] = None,
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1e-6, help="Speed of prefill.")] = 10_000.0,
    attention_equal_at: Annotated[
        float, typer.Option(min=1.0, help="Position at which attending costs as much as the weights.")
    ] = 32_768.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first N requests.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write as JSON.")] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.")
    ] = None,
) -> None:
    """Replay traces under every policy: hits and prefill left, with intervals, beside LRU and the bound."""
    console = Console(highlight=False)
    policies = parse_policies(policy)
    sizes = None if capacity is None else parse_capacities(capacity)
    if sizes is not None and None in sizes:
        raise ConfigError("an unlimited cache evicts nothing; name sizes in blocks")
    model = PrefillModel(prefill_tokens_per_s, attention_equal_at)
    read = [_read(console, name, limit) for name in traces or PUBLIC]
    rows: list[BenchRow] = []
    for trace in read:
        chosen = sizes_of(trace, _SHARES) if sizes is None else [size for size in sizes if size is not None]
        with open_progress(trace.name) as progress:
            counter = StepCounter(progress, trace.name, len(chosen) * len(policies))
            rows += bench(trace, policies, chosen, model, counter.advance)
        Console(width=_WIDEST_TABLE, highlight=False).print(
            _table(trace, [row for row in rows if row.trace == trace.version])
        )
    if json_path is not None:
        write_json(json_path, [asdict(row) for row in rows])
    if html_path is not None:
        from stemma_lab.bench_html import write_bench_page  # plotly takes a second, and is an extra

        write_bench_page(html_path, read, rows, model, " ".join(("stemma", *sys.argv[1:])))


def _read(console: Console, name: str, limit: int | None) -> Trace:
    if name not in PUBLIC:
        return load_trace(console, Path(name), None, False, None, limit)
    with as_file(files("stemma_lab.traces") / "public" / f"{name}.jsonl.gz") as path:
        return load_trace(console, path, None, False, None, limit)


def _table(trace: Trace, rows: Sequence[BenchRow]) -> Table:
    table = Table(title=f"{trace.version}", title_justify="left")
    for column in ("blocks", "policy", "block hit ratio", "95 %", "prefill left", "saved beside LRU", "95 %"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        table.add_row(
            f"{row.capacity_blocks:,}",
            row.policy,
            f"{row.hit_ratio.value:.4f}",
            f"{row.hit_ratio.low:.3f} to {row.hit_ratio.high:.3f}",
            f"{row.prefill_s.value:,.0f} s",
            f"{row.saved.value:+.1%}",
            f"{row.saved.low:+.1%} to {row.saved.high:+.1%}",
        )
    return table
