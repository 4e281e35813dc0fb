"""``stemma bench``: drive any OpenAI-compatible server and measure it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stemma.cli.client import RequestFailed, TokenCounter, first_model, make_http
from stemma.cli.json_file import write_json
from stemma_lab.measure.driver import DEFAULT_CONCURRENCY, Endpoint, LoadOptions, Record, drive, negotiate
from stemma_lab.measure.report import Summary, as_json, summarize, times_table, totals_table
from stemma_lab.measure.workloads import Session, WorkloadName, WorkloadOptions, build

EXIT_INTERRUPTED = 130
"""Exit status that shells report for Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark against one server."""

    url: str
    model: str | None
    api_key: str | None
    endpoint: Endpoint
    load: LoadOptions
    count_tokens: TokenCounter | None = None


def command(
    url: Annotated[
        str, typer.Argument(help="The server, e.g. http://127.0.0.1:8000.")
    ] = "http://127.0.0.1:8000",
    workload: Annotated[
        WorkloadName, typer.Option("--workload", "-w", help="What to ask.")
    ] = "shared-prefix",
    model: Annotated[str | None, typer.Option(help="Model name; default: the first one listed.")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="Which endpoint.")] = "completions",
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", min=1, help="Sessions at once; default: 8, at a rate no limit."),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Sessions begun a second, Poisson; default: no wait.")
    ] = None,
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", min=1, help="Prompts.")] = 32,
    num_sessions: Annotated[int, typer.Option(min=1, help="multi-turn: chats.")] = 8,
    num_turns: Annotated[int, typer.Option(min=1, help="multi-turn: questions a chat.")] = 6,
    input_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt's own part.")] = 256,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens that prompts share.")] = 512,
    num_prefixes: Annotated[int, typer.Option(min=1, help="shared-prefix: different prefixes.")] = 1,
    num_repeats: Annotated[int, typer.Option(min=1, help="repeat: times each prompt comes.")] = 4,
    num_shots: Annotated[int, typer.Option(min=0, help="few-shot: worked examples.")] = 5,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    data: Annotated[Path | None, typer.Option(help="few-shot, sonnet: where the texts are.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Checkpoint directory whose tokenizer counts tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts.")] = 0,
    api_key: Annotated[str | None, typer.Option(envvar="STEMMA_API_KEY", help="Bearer token.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
) -> None:
    """Measure a server: first token, tokens per second, and how much of the prompts came from its cache."""
    console = Console(highlight=False)
    count_tokens = _token_counter(tokenizer)
    options = WorkloadOptions(
        num_requests=num_requests,
        num_sessions=num_sessions,
        num_turns=num_turns,
        input_tokens=input_tokens,
        prefix_tokens=prefix_tokens,
        num_prefixes=num_prefixes,
        num_repeats=num_repeats,
        num_shots=num_shots,
        data=data,
        seed=seed,
    )
    sessions = build(workload, options, count_tokens)
    if concurrency is None and request_rate is None:
        concurrency = DEFAULT_CONCURRENCY
    load = LoadOptions(concurrency, request_rate, output_tokens, seed)
    run = Run(url, model, api_key, endpoint, load, count_tokens)
    summary, records, target_name, is_whole = asyncio.run(_run(console, run, sessions))
    if not is_whole:
        console.print(f"[yellow]interrupted after {len(records)} requests; what follows is theirs[/]")
    console.print(f"[bold]{target_name}[/] at {url}, workload [bold]{workload}[/], {_describe(load)}")
    console.print(times_table(summary))
    console.print(totals_table(summary))
    if json_file is not None:
        setup = {
            "url": url,
            "model": target_name,
            "workload": workload,
            "endpoint": endpoint,
            "options": {**asdict(options), "data": str(data) if data else None},
            "load": asdict(load),
        }
        write_json(json_file, as_json(summary, records, setup))
    _fail_if_any_failed(console, summary, records)
    if not is_whole:
        raise typer.Exit(EXIT_INTERRUPTED)


def _describe(load: LoadOptions) -> str:
    parts = [] if load.concurrency is None else [f"concurrency {load.concurrency}"]
    if load.request_rate is not None:
        parts.append(f"{load.request_rate:g} sessions/s")
    return ", ".join(parts)


def _token_counter(path: Path | None) -> TokenCounter | None:
    if path is None:
        return None
    from stemma.model.load.located import located_path
    from stemma.model.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(located_path(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


async def _run(
    console: Console, run: Run, sessions: list[Session]
) -> tuple[Summary, list[Record], str, bool]:
    """Return summary and records, the model's name, and whether all requests were sent: Ctrl-C stops them."""
    num_requests = sum(len(session.turns) for session in sessions)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with make_http(run.url, run.api_key) as http:
        model = run.model or await first_model(http)
        target = await negotiate(http, model, run.endpoint, run.count_tokens)
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("requests", total=num_requests)
            ended: list[Record] = []

            def note(record: Record) -> None:
                ended.append(record)
                progress.advance(task)

            started = time.perf_counter()
            try:
                records, wall_s = await drive(target, sessions, run.load, note)
            except asyncio.CancelledError:
                return summarize(ended, time.perf_counter() - started), ended, model, False
    return summarize(records, wall_s), records, model, True


def _fail_if_any_failed(console: Console, summary: Summary, records: list[Record]) -> None:
    if not summary.num_failed:
        return
    reasons = dict.fromkeys(record.error for record in records if record.error)
    for reason in list(reasons)[:3]:
        console.print(f"[red]failed:[/] {reason}")
    raise RequestFailed(f"{summary.num_failed} of {summary.num_requests} requests failed")
