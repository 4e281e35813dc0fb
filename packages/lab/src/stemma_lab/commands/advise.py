"""`stemma advise`: what to change for this traffic, from a recorded trace or a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.text import Text

from stemma.cli.admin_client import ask
from stemma.cli.progress import open_progress
from stemma.config.sizes import parse_size
from stemma.errors import ConfigError
from stemma_lab.advice import advise
from stemma_lab.commands.plan import parse_tiers
from stemma_lab.commands.pool import layout_of
from stemma_lab.commands.replay import load_trace
from stemma_lab.plan import Workload
from stemma_lab.savings import PrefillModel, Prices
from stemma_lab.served_advice import from_server


def command(
    source: Annotated[
        str, typer.Argument(metavar="TRACE|URL", help="A recorded trace, or a running server.")
    ],
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint directory or config.json, for the size of a token's KV.")
    ] = None,
    bytes_per_token: Annotated[str | None, typer.Option(help="That size instead, e.g. 128KiB.")] = None,
    gpu_memory: Annotated[str, typer.Option(help="Device memory for KV, after weights, e.g. 40GB.")] = "40GB",
    dram: Annotated[str, typer.Option(help="Host memory for KV.")] = "0",
    ssd: Annotated[str, typer.Option(help="Disk for KV.")] = "0",
    policy: Annotated[str, typer.Option(help="Eviction policy in use.")] = "lru",
    dram_speed: Annotated[str, typer.Option(help="Bytes per second from host to device.")] = "20GB",
    ssd_speed: Annotated[str, typer.Option(help="Bytes per second from disk to device.")] = "3GB",
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1e-6, help="Speed of prefill.")] = 10_000.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first N requests.")] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="STEMMA_ADMIN_KEY", help="Admin key of the server.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what to change for this traffic: memory, tiers, policy, prompts, or the cache itself."""
    console = Console(highlight=False, markup=False, stderr=as_json)
    if source.startswith(("http://", "https://")):
        stats = ask(source, "GET", "/admin/stats", admin_key)
        found = from_server(stats, ask(source, "GET", "/admin/divergences", admin_key))
        figures: object = found
    else:
        trace = load_trace(console, Path(source), None, False, None, limit)
        workload = Workload(
            trace,
            _bytes_per_token(model, bytes_per_token),
            PrefillModel(prefill_tokens_per_s),
            Prices(),
            policy,
            "auto",
            "all",
        )
        tiers = parse_tiers((gpu_memory, dram, ssd), (dram_speed, ssd_speed))
        with open_progress("replaying"):
            found = advise(workload, tiers)
        figures = trace.version.on(found)
        console.print(Text(f"{trace.version}"))
    if as_json:
        typer.echo(orjson.dumps(figures, option=orjson.OPT_INDENT_2).decode())
        return
    for one in found:
        console.print(Text(f"- {one.text}"))
        if one.setting is not None:
            console.print(Text(f"  -> {one.setting}", style="bold"))


def _bytes_per_token(model: Path | None, given: str | None) -> int:
    if (model is None) == (given is None):
        raise ConfigError("give --model or --bytes-per-token: the size of a token's KV")
    return layout_of(model, None).bytes_per_token if model is not None else parse_size(str(given))
