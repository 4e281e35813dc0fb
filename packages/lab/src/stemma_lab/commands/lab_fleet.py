"""`stemma lab fleet`: the real router before simulated servers, of which some fall sick."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from stemma.cli.json_file import write_json
from stemma.cli.progress import StepCounter, open_progress
from stemma.errors import ConfigError
from stemma_lab.commands.replay import load_trace
from stemma_lab.fleet.decoding import DecodeModel
from stemma_lab.fleet.simulation import FleetRun, FleetSettings, one_cache_hits, simulate
from stemma_lab.fleet.traffic import TenantModel, Traffic, traffic_of
from stemma_lab.savings import PrefillModel
from stemma_router.cluster.holdings import MAX_BLOCKS
from stemma_router.cluster.routers import ROUTERS

_AFTER_S = 5.0
_WINDOW_S = 10.0
"""The gap after a restart is taken of requests that arrive between 5 and 15 s after it."""


def command(
    trace: Annotated[
        Path | None, typer.Argument(help="Recorded or public trace; default: made-up tenants.")
    ] = None,
    servers: Annotated[int, typer.Option(min=1, max=1024, help="Servers at the start.")] = 16,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks that each server caches.")] = 20_000,
    tenants: Annotated[int, typer.Option(min=1, help="Made-up tenants.")] = 10_000,
    seconds: Annotated[float, typer.Option(min=1.0, help="Virtual time of made-up traffic.")] = 120.0,
    busy: Annotated[
        float,
        typer.Option(
            min=0.01, max=1.0, help="Share of time that servers compute, if they compute nothing twice."
        ),
    ] = 0.3,
    cold: Annotated[
        bool, typer.Option("--cold", help="Begin with empty caches, not with full ones.")
    ] = False,
    router: Annotated[str, typer.Option(help=f"One of: {', '.join(ROUTERS)}.")] = "cache-aware",
    faults: Annotated[
        int, typer.Option(min=0, help="Servers that hang, answer garbage, die, and drain: so many each.")
    ] = 1,
    fault_s: Annotated[float, typer.Option(min=0.1, help="How long each is sick.")] = 20.0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Restart the router in the middle; a second run tells the gap.")
    ] = False,
    index_blocks: Annotated[
        int, typer.Option(min=1000, help="Blocks that the router knows at most.")
    ] = MAX_BLOCKS,
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1.0, help="Speed of prefill.")] = 10_000.0,
    decode_tokens_per_s: Annotated[
        float, typer.Option(min=0.1, help="Speed of an answer that a server computes alone.")
    ] = 50.0,
    decode_slowdown: Annotated[
        float, typer.Option(min=0.0, help="How much longer a step takes for each further answer, as a share.")
    ] = 0.01,
    seats: Annotated[int, typer.Option(min=1, help="Answers that each server computes at once.")] = 64,
    seed: Annotated[int, typer.Option(help="Of traffic and faults.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first N requests.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write as JSON.")] = None,
) -> None:
    """Run the real router before simulated servers: hits, waits, losses, and its own cost."""
    if find_spec("msgspec") is None:
        raise ConfigError("snapshots need the events' format: pip install stemma-router")
    console = Console(highlight=False, soft_wrap=True)
    begun = time.monotonic()
    prefill = PrefillModel(prefill_tokens_per_s)
    if trace is not None:
        traffic = traffic_of(load_trace(console, trace, None, False, None, limit), busy, servers, prefill)
    else:
        warm_blocks = 0 if cold else servers * blocks
        traffic = TenantModel(tenants).traffic_at(busy, servers, seconds, warm_blocks, seed, prefill)
    decode = DecodeModel(1 / decode_tokens_per_s, decode_slowdown / decode_tokens_per_s)
    settings = FleetSettings(
        servers, blocks, router, prefill, decode, seats,
        index_blocks=index_blocks, faults=faults, fault_s=fault_s, seed=seed,
    )  # fmt: skip
    with _errors_alone():
        report = _report(traffic, settings, restart)
    report["wall_s"] = round(time.monotonic() - begun, 1)
    report["peak_memory_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _show(console, report)
    if json_path is not None:
        write_json(json_path, report)


@contextmanager
def _errors_alone() -> Iterator[None]:
    """Leave warnings out: each try that fails would be a line."""
    logger = logging.getLogger("stemma")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _report(traffic: Traffic, settings: FleetSettings, restart: bool) -> dict[str, Any]:
    with open_progress("simulating") as progress:
        counter = StepCounter(progress, "simulating", traffic.num_requests * (1 + restart))
        run = simulate(traffic, settings, counter.advance)
        again = None
        if restart:
            at_s = float(traffic.arrivals_s[-1]) / 2
            counter.stage = "simulating with a restart of the router"
            again = simulate(traffic, replace(settings, restart_at_s=at_s), counter.advance)
    one = one_cache_hits(traffic, settings.num_servers * settings.capacity_blocks)
    report = {
        "traffic": traffic.name,
        "settings": asdict(settings),
        **summary(run),
        "one_cache_hit_ratio": float(one.sum()) / max(1, int(run.num_prompt_blocks.sum())),
    }
    if again is not None:
        report["restart"] = restart_gap(traffic, run, again, at_s)
    return report


def summary(run: FleetRun) -> dict[str, Any]:
    """Return the JSON form of a run, without its arrays."""
    cpu = run.cpu
    num_requests = run.outcomes.total()
    num_failed = num_requests - run.outcomes["right"] - run.outcomes["broken"]
    router_s = cpu.decisions_s + cpu.checks_s + cpu.events_s
    return {
        "num_requests": num_requests,
        "num_failed": num_failed,
        "num_broken": run.outcomes["broken"],
        "success": run.success,
        "outcomes": dict(run.outcomes),
        "tries": dict(run.tries),
        "num_retries": run.num_retries,
        "num_ejections": run.num_ejections,
        "faults": dict(run.num_faults),
        "hit_ratio": run.hit_ratio,
        "ttft_p50_s": float(np.nanquantile(run.ttft_s, 0.5)),
        "ttft_p99_s": run.ttft_p99_s,
        "router_cpu_s": router_s,
        "router_cpu": asdict(cpu),
        "cpu_ms_per_request": 1e3 * cpu.decisions_s / max(1, num_requests),
        "cpu_us_per_event_block": 1e6 * cpu.events_s / max(1, cpu.num_event_blocks),
        "cpu_us_per_snapshot_block": 1e6 * cpu.snapshots_s / max(1, cpu.num_snapshot_blocks),
        "index_blocks": run.num_index_blocks,
        "index_bytes": run.num_index_bytes,
        "index_bytes_per_block": run.num_index_bytes / max(1, run.num_index_blocks),
        "index_evicted": run.num_index_evicted,
    }


def restart_gap(traffic: Traffic, plain: FleetRun, again: FleetRun, at_s: float) -> dict[str, Any]:
    """Return hit ratios of the same requests without and with the restart: right after it, and 5 s later."""

    def ratios(since_s: float, until_s: float) -> dict[str, float]:
        chosen = (traffic.arrivals_s >= at_s + since_s) & (traffic.arrivals_s < at_s + until_s)
        blocks = max(1, int(plain.num_prompt_blocks[chosen].sum()))
        without, with_it = (int(run.num_hit_blocks[chosen].sum()) / blocks for run in (plain, again))
        return {"without": without, "with": with_it, "gap_points": 100 * (without - with_it)}

    return {
        "at_s": at_s,
        "snapshots_ready_s": again.snapshots_ready_s,
        "first_5_s": ratios(0.0, _AFTER_S),
        "after_5_s": ratios(_AFTER_S, _AFTER_S + _WINDOW_S),
        "num_failed": again.outcomes.total() - again.outcomes["right"] - again.outcomes["broken"],
    }


def _show(console: Console, report: dict[str, Any]) -> None:
    settings = report["settings"]
    size = f"{settings['num_servers']:,} servers of {settings['capacity_blocks']:,} blocks"
    console.print(f"[bold]{report['traffic']}, {report['num_requests']:,} requests; {size}[/]")
    for name, value in _lines(report):
        console.print(f"{name:<20} {value}")


def _lines(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    one = f"one cache of all memory: {report['one_cache_hit_ratio']:.4f}"
    yield "hit ratio", f"{report['hit_ratio']:.4f} ({one})"
    yield "first byte", f"p50 {report['ttft_p50_s']:.2f} s, p99 {report['ttft_p99_s']:.2f} s"
    sick = ", ".join(f"{count} {kind}" for kind, count in report["faults"].items())
    yield "sick servers", sick or "none"
    failed, broken = report["num_failed"], report["num_broken"]
    yield "requests failed", f"{failed:,} before a byte, {broken:,} after the first"
    yield "retries, ejections", f"{report['num_retries']:,}, {report['num_ejections']:,}"
    if "restart" in report:
        gap = report["restart"]
        first, later = gap["first_5_s"]["gap_points"], gap["after_5_s"]["gap_points"]
        ready_s = gap["snapshots_ready_s"]
        ready = "not in before the end" if ready_s is None else f"in after {ready_s:.1f} s"
        lower = f"hit ratio {first:+.2f} points lower in the first 5 s, {later:+.2f} in the 10 s after them"
        yield "router restarted", f"snapshots {ready}; {lower}; {gap['num_failed']:,} failed"
    yield (
        "router's CPU",
        f"{report['router_cpu_s']:.1f} s: {report['cpu_ms_per_request']:.2f} ms a request, "
        f"{report['cpu_us_per_event_block']:.1f} us a block of events, "
        f"{report['cpu_us_per_snapshot_block']:.2f} us a block of snapshots",
    )
    yield (
        "router's index",
        f"{report['index_blocks']:,} blocks, {report['index_bytes'] / 1e6:,.0f} MB: "
        f"{report['index_bytes_per_block']:.1f} bytes a block and holder; "
        f"{report['index_evicted']:,} evicted",
    )
    peak = report["peak_memory_bytes"] / 1e6
    yield "this simulation", f"{report['wall_s']:.0f} s, {peak:,.0f} MB at its peak"
