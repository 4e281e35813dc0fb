"""`stemma order`: compare the orders in which waiting requests could be served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stemma.cli.json_file import write_json
from stemma.cli.progress import StepCounter, open_progress
from stemma.cli.replay import load_trace
from stemma.lab.order import ORDERS, Server, replay_order
from stemma.lab.savings import PrefillModel


def command(
    trace_path: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file, plain or .gz.")],
    capacity: Annotated[int, typer.Option(min=1, help="Cache size in blocks of the trace.")] = 10_000,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = "lru",
    orders: Annotated[str, typer.Option(help="Orders, comma-separated.")] = ",".join(ORDERS),
    time_scale: Annotated[
        float, typer.Option(min=0.0, help="Multiply arrival times; below 1 adds load, 0 is one batch.")
    ] = 1.0,
    ageing_s: Annotated[float, typer.Option(min=0.0, help="Patience of the order `ageing`.")] = 5.0,
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1e-6, help="Speed of prefill.")] = 10_000.0,
    attention_equal_at: Annotated[
        float, typer.Option(min=1.0, help="Position at which attending costs as much as the weights.")
    ] = 32_768.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first N requests.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write as JSON.")] = None,
) -> None:
    """Replay a trace with a service-time model: hits and waiting by scheduling order."""
    console = Console(highlight=False)
    trace = load_trace(console, trace_path, None, False, None, limit)
    server = Server(capacity, policy, PrefillModel(prefill_tokens_per_s, attention_equal_at), ageing_s)
    results = []
    for order in (name.strip() for name in orders.split(",")):
        with open_progress(order) as progress:
            counter = StepCounter(progress, order, trace.num_requests)
            results.append(replay_order(trace, order, server, time_scale, counter.advance))
    table = Table(
        title=f"{trace.name}: {capacity:,} blocks, {policy}, arrival times x {time_scale:g}",
        title_justify="left",
    )
    for name in ("order", "block hit ratio", "of the optimum", "wait mean", "wait p99", "busy"):
        table.add_column(name, justify="left" if name == "order" else "right")
    for result in results:
        table.add_row(
            result.order,
            f"{result.block_hit_ratio:.4f}",
            f"{result.share_of_optimal:.1%}",
            f"{result.wait_mean_s:,.1f} s",
            f"{result.wait_p99_s:,.1f} s",
            f"{result.busy_s:,.0f} s",
        )
    console.print(table)
    if json_path is not None:
        write_json(json_path, [result.as_dict() for result in results])
