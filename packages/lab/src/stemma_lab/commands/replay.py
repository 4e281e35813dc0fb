"""`stemma replay`: what would a cache of this size save my traffic, and under which policy?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

from stemma.cli.json_file import write_json
from stemma.cli.progress import StepCounter, open_progress
from stemma.errors import ConfigError
from stemma_lab.admission import ADMISSIONS
from stemma_lab.commands.replay_replicas import replay_clusters, replica_table
from stemma_lab.policies.from_file import names_file, policy_from
from stemma_lab.replay import BOUNDS, ReplayResult, known_policies, replay
from stemma_lab.replicas import Cluster
from stemma_lab.report import (
    ReportRow,
    hit_ratio_table,
    make_rows,
    make_tier_row,
    savings_table,
    tier_table,
)
from stemma_lab.savings import PrefillModel, Prices
from stemma_lab.served import served_tokens
from stemma_lab.tiers import SHARINGS, TierPlan, replay_tiers
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.openai_chat import ChatTokenizer
from stemma_lab.traces.reader import FORMATS, open_trace
from stemma_lab.traces.version import digest_of

DEFAULT_CAPACITIES = "1000,3000,5000,10000,20000,30000,50000,100000"
_WIDEST_TABLE = 1000
LIMIT_OPTION = typer.Option("--limit", min=1, help="Read only the first N requests.")


def replay_command(
    trace_path: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file, plain or .gz.")],
    policy: Annotated[
        str, typer.Option(help="Policies, comma-separated; `min`, `oracle` and `oracle-crossed` are bounds.")
    ] = ("lru,hazard,min"),
    capacity: Annotated[
        str, typer.Option(help="Cache sizes in blocks of the trace, comma-separated; `unlimited` is one.")
    ] = DEFAULT_CAPACITIES,
    cost: Annotated[
        str, typer.Option(help="What a block is worth: `blocks` (all equal) or `prefill-time`.")
    ] = "blocks",
    trace_format: Annotated[
        str | None,
        typer.Option("--format", help=f"One of {', '.join(FORMATS)}; default: by looks."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Checkpoint whose tokenizer reads an OpenAI chat trace.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count unreadable lines and go on.")] = False,
    limit: Annotated[int | None, LIMIT_OPTION] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON.")
    ] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained report with plots.")
    ] = None,
    prefill_tokens_per_s: Annotated[
        float, typer.Option(min=1e-6, help="Measured or assumed speed.")
    ] = 10_000.0,
    attention_equal_at: Annotated[
        float, typer.Option(min=1.0, help="Position at which attending costs as much as the weights.")
    ] = 32_768.0,
    price_miss: Annotated[float, typer.Option(min=0.0, help="Per million prompt tokens computed.")] = 1.0,
    price_hit: Annotated[float, typer.Option(min=0.0, help="Per million prompt tokens from cache.")] = 0.1,
    below: Annotated[
        str | None, typer.Option(help="Blocks of the tiers below the device, e.g. 20000 or 20000,100000.")
    ] = None,
    sharing: Annotated[str, typer.Option(help=f"How tiers share blocks: {', '.join(SHARINGS)}.")] = "auto",
    admission: Annotated[
        str, typer.Option(help="What moves down: all (as in a server), reused, adaptive.")
    ] = "all",
    replicas: Annotated[
        str | None, typer.Option(help="Replicas behind a router, e.g. 4 or 1,4,16; sizes are those of each.")
    ] = None,
    router: Annotated[str, typer.Option(help="Routers, comma-separated, or `all`.")] = "all",
    event_lag_s: Annotated[
        float, typer.Option(min=0.0, help="With --replicas: delay of the events that the router goes by.")
    ] = 0.0,
    event_loss: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With --replicas: share of events that never arrive.")
    ] = 0.0,
    busy: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="With --replicas: share of time that replicas compute.")
    ] = 0.5,
) -> None:
    """Replay a trace through the index and the eviction policies that serve requests."""
    console = Console()
    policies = parse_policies(policy)
    sizes = parse_capacities(capacity)
    model, prices = PrefillModel(prefill_tokens_per_s, attention_equal_at), Prices(price_miss, price_hit)
    trace = load_trace(console, trace_path, trace_format, skip_bad, tokenizer, limit)
    if below is not None:
        if html_path is not None or cost != "blocks":
            raise ConfigError("--html and --cost are for one tier; leave out --below")
        rows = _replay_tiers(trace, policies, sizes, (below, sharing, admission), model, prices)
        console.print(tier_table(trace, rows, sharing, admission, model))
        _write_files(console, trace, [], rows, json_path, None)
        return
    if replicas is not None:
        cluster = Cluster(1, None, "lru", model, busy, event_lag_s, event_loss)
        with open_progress("replaying") as progress:
            report = replay_clusters(trace, policies, sizes, (replicas, router), cluster, progress)
        Console(width=_WIDEST_TABLE).print(replica_table(trace, report, cluster))
        if json_path is not None:
            write_json(json_path, trace.version.on([result.as_dict() for result in report]))
        return
    costs = parse_cost(cost, trace, model)
    results = _replay_all(trace, policies, sizes, costs)
    rows = make_rows(trace, results, model, prices)
    Console(width=_WIDEST_TABLE).print(hit_ratio_table(trace, rows))
    console.print(savings_table(trace, rows, model, prices))
    for caveat in trace.caveats:
        console.print(f"note: {caveat}", style="dim")
    _tell_error(console, trace)
    _write_files(console, trace, results, rows, json_path, html_path)


def _tell_error(console: Console, trace: Trace) -> None:
    """Say how far a replay of the recorded cache is from what the server found, if the trace tells both."""
    measured, is_told = trace.measured, trace.cached_tokens >= 0
    if measured is None or not measured.capacity_blocks or not is_told.all():
        return
    num_tokens = max(1, int(trace.input_tokens.sum()))
    found = float(trace.cached_tokens.sum()) / num_tokens
    replayed = float(served_tokens(trace, measured).sum()) / num_tokens
    console.print(
        f"The server that recorded it found {found:.1%} of prompt tokens on its device. Replayed with its "
        f"policy ({measured.eviction}), its size ({measured.capacity_blocks:,} blocks) and its times, while "
        f"running requests hold their blocks: {replayed:.1%}, an error of "
        f"{100 * (replayed - found):+.1f} points."
    )


def parse_policies(text: str) -> list[str]:
    """Return the names; raise ConfigError for one that doesn't exist."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = known_policies()
    for name in names:
        if names_file(name):
            policy_from(name)
        elif name not in known:
            raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(known)}")
    if not names:
        raise ConfigError("name at least one policy")
    return list(dict.fromkeys(names))


def parse_capacities(text: str) -> list[int | None]:
    """Return the sizes in blocks, None for `unlimited`; raise ConfigError if one is no count."""
    sizes: list[int | None] = []
    for part in (part.strip().replace("_", "") for part in text.split(",")):
        if part in ("unlimited", "inf"):
            sizes.append(None)
        elif part.isdigit() and int(part) > 0:
            sizes.append(int(part))
        else:
            raise ConfigError(f"not a capacity in blocks: {part!r}")
    return list(dict.fromkeys(sizes))


def parse_cost(name: str, trace: Trace, model: PrefillModel) -> npt.NDArray[np.float32] | None:
    """Return seconds per block by depth for `prefill-time`, None for `blocks`."""
    if name == "blocks":
        return None
    if name == "prefill-time":
        return model.block_seconds(int(np.diff(trace.offsets).max(initial=0)), trace.block_size)
    raise ConfigError(f"unknown cost {name!r}; known: blocks, prefill-time")


def load_trace(
    console: Console,
    path: Path,
    trace_format: str | None,
    skip_bad: bool,
    tokenizer: Path | None,
    limit: int | None,
) -> Trace:
    """Read a trace with a progress bar; say what was skipped. Raises ConfigError if it has no blocks."""
    with open_progress(f"reading {path.name}") as progress:
        is_plain = path.is_file() and path.suffix != ".gz"
        counter = StepCounter(progress, f"reading {path.name}", path.stat().st_size if is_plain else None)
        make_tokenizer = None if tokenizer is None else _tokenizer_loader(tokenizer)
        reader = open_trace(
            path, trace_format, skip_bad=skip_bad, tokenizer=make_tokenizer, progress=counter.advance
        )
        requests = iter(reader)
        if limit is not None:
            requests = (request for _, request in zip(range(limit), requests, strict=False))
        # The block size may stand in a header line, so it is read after the first request.
        collected = collect(path.name, lambda: reader.format.block_size, requests, reader.format.caveats)
    collected = replace(collected, measured=reader.format.measured, sha256=digest_of(path))
    if reader.num_bad:
        console.print(f"{reader.num_bad} bad lines skipped", style="yellow")
        for reason in reader.bad_lines:
            console.print(f"  {reason}", style="yellow")
    if collected.num_blocks == 0:
        raise ConfigError(f"{collected.name} can't be replayed: {'; '.join(collected.caveats)}")
    return collected


def _tokenizer_loader(path: Path) -> Callable[[], ChatTokenizer]:
    def load() -> ChatTokenizer:
        from stemma.model.load.located import located_path
        from stemma.model.text.tokenizer import (
            Tokenizer,  # takes seconds to import, and only one format needs it
        )

        return Tokenizer(located_path(path))

    return load


def _replay_all(
    trace: Trace,
    policies: list[str],
    sizes: list[int | None],
    costs: npt.NDArray[np.float32] | None,
) -> list[ReplayResult]:
    results = []
    with open_progress("replaying") as progress:
        counter = StepCounter(progress, "replaying", len(policies) * len(sizes) * trace.num_requests)
        for name in policies:
            for size in sizes:
                counter.stage = f"{name}, {size or 'unlimited'} blocks"
                results.append(replay(trace, name, size, costs, counter.advance))
    return results


def _replay_tiers(
    trace: Trace,
    policies: list[str],
    sizes: list[int | None],
    tiers: tuple[str, str, str],
    model: PrefillModel,
    prices: Prices,
) -> list[ReportRow]:
    """Replay every policy and device size above the tiers (sizes, sharing, admission)."""
    below, sharing, admission = tiers
    if sharing not in SHARINGS or admission not in ADMISSIONS:
        raise ConfigError(f"unknown sharing or admission: {sharing!r}, {admission!r}")
    lower = parse_capacities(below)
    if None in lower or None in sizes:
        raise ConfigError("tiers need sizes, not `unlimited`")
    rows = []
    with open_progress("replaying") as progress:
        names = [name for name in policies if name not in BOUNDS]
        counter = StepCounter(progress, "replaying", len(names) * len(sizes) * trace.num_requests)
        for name in names:
            for size in sizes:
                capacities = cast(tuple[int, ...], (size, *lower))
                plan = TierPlan(capacities, name, sharing, admission)
                started = time.perf_counter()
                result = replay_tiers(trace, plan, counter.advance)
                rows.append(make_tier_row(trace, result, time.perf_counter() - started, model, prices))
    return rows


def _write_files(
    console: Console,
    trace: Trace,
    results: list[ReplayResult],
    rows: list[ReportRow],
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    if json_path is not None:
        write_json(json_path, trace.version.on(rows))
        console.print(f"rows: {json_path}")
    if html_path is not None:
        from stemma_lab.html import write_replay_report  # plotly is an extra

        write_replay_report(html_path, trace, results, rows)
        console.print(f"report: {html_path}")
