"""`stemma order`: compare the orders in which waiting requests could be served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stemma.cli.json_file import write_json
from stemma.cli.progress import StepCounter, open_progress
from stemma.errors import ConfigError
from stemma_lab.closed_loop import LOOP_ORDERS, LoopServer, make_loop, run_loop
from stemma_lab.columns import ColumnAdvice, advise_columns, read_table
from stemma_lab.commands.replay import load_trace
from stemma_lab.order import ORDERS, QueueServer, replay_order
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Trace


def command(
    trace_path: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="Trace file, plain or .gz.")
    ] = None,
    columns: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE", help="Say instead what another order of the columns of this CSV or JSONL saves."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --columns: checkpoint whose tokenizer counts.")
    ] = None,
    capacity: Annotated[int, typer.Option(min=1, help="Cache size in blocks of the trace.")] = 10_000,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = "lru",
    orders: Annotated[str | None, typer.Option(help="Orders, comma-separated; default: all.")] = None,
    closed_loop: Annotated[
        bool,
        typer.Option(
            help="Let a session's next request come its gap after its answer; `resident` is an order."
        ),
    ] = False,
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
    if columns is not None:
        _tell_columns(console, advise_columns(read_table(columns), _counter(tokenizer)), json_path)
        return
    if trace_path is None:
        raise ConfigError("name a trace, or a table with --columns")
    trace = load_trace(console, trace_path, None, False, None, limit)
    if closed_loop:
        prefill = PrefillModel(prefill_tokens_per_s, attention_equal_at)
        loop_server = LoopServer(capacity, policy, prefill, ageing_s=ageing_s)
        _tell_loop(console, trace, _names(orders, LOOP_ORDERS), loop_server, json_path)
        return
    server = QueueServer(capacity, policy, PrefillModel(prefill_tokens_per_s, attention_equal_at), ageing_s)
    results = []
    for order in _names(orders, ORDERS):
        with open_progress(order) as progress:
            counter = StepCounter(progress, order, trace.num_requests)
            results.append(replay_order(trace, order, server, time_scale, counter.advance))
    table = Table(
        title=f"{trace.version}: {capacity:,} blocks, {policy}, arrival times x {time_scale:g}",
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
        write_json(json_path, trace.version.on([result.as_dict() for result in results]))


def _names(orders: str | None, known: Sequence[str]) -> list[str]:
    return list(known) if orders is None else [name.strip() for name in orders.split(",")]


def _tell_loop(
    console: Console, trace: Trace, orders: list[str], server: LoopServer, json_path: Path | None
) -> None:
    """Run sessions in a closed loop: what is computed, and how long turns take, by order."""
    loop = make_loop(trace, server)
    with open_progress("serving") as progress:
        counter = StepCounter(progress, "serving", len(orders))
        results = [run_loop(loop, order, server).as_dict() for order in counter.over(orders)]
    title = f"{trace.version}: {server.capacity_blocks:,} blocks, {server.policy}, closed loop"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for name in ("order", "computed", "turn, mean", "p50", "p99", "slowdown p50", "worst", "ended"):
        table.add_column(name, justify="left" if name == "order" else "right")
    for result in results:
        table.add_row(*(cell if isinstance(cell, str) else _short(cell) for cell in result.values()))
    console.print(table)
    if json_path is not None:
        write_json(json_path, trace.version.on(results))


def _short(value: float) -> str:
    return f"{value / 1e6:,.1f} M" if value >= 1e6 else f"{value:,.1f}"


def _counter(tokenizer: Path | None) -> Callable[[str], int]:
    """Return what counts the tokens of a text: four characters each if there is no tokenizer."""
    if tokenizer is None:
        return lambda text: -(-len(text) // 4)
    from stemma.model.load.located import located_path
    from stemma.model.text.tokenizer import Tokenizer  # takes seconds to import

    read = Tokenizer(located_path(tokenizer))
    return lambda text: len(read.encode(text, add_special_tokens=False))


def _tell_columns(console: Console, found: ColumnAdvice, json_path: Path | None) -> None:
    """Print what was found. Prompts are the user's: another order changes them, so this only advises."""
    for what, names, num_shared in (
        ("as they come", found.given, found.num_shared_given),
        ("better", found.better, found.num_shared_better),
    ):
        share = num_shared / max(1, found.num_tokens)
        console.print(
            f"{what + ':':<14}{share:6.1%} of {found.num_tokens:,} tokens shared: {', '.join(names)}"
        )
    if found.better == found.given:
        console.print("No better order was found.")
    else:
        saved = found.num_shared_better - found.num_shared_given
        console.print(
            f"Prompts in the better order, run depth first as batches are, compute {saved:,} tokens "
            "less. That changes the prompts: see that the answers stay good."
        )
    if json_path is not None:
        write_json(json_path, asdict(found))
