"""`stemma advise`: what to change for this traffic, from a recorded trace or a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.text import Text

from stemma.cli.admin_client import ask
from stemma.cli.progress import open_progress
from stemma.config.sizes import parse_size
from stemma.errors import ConfigError
from stemma_lab.advice import Advice, advise
from stemma_lab.commands.plan import parse_tiers
from stemma_lab.commands.pool import layout_of
from stemma_lab.commands.replay import load_trace
from stemma_lab.plan import Workload
from stemma_lab.savings import PrefillModel, Prices

_MIN_REQUESTS = 100
"""Requests of a running server; fewer say little."""
_LOW_HITS = 0.02
_HIGH_REGRET = 0.1


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


def from_server(stats: dict[str, Any], divergences: dict[str, Any]) -> list[Advice]:
    """Return advice from a server's counters (``/admin/stats``, ``/admin/divergences``)."""
    num_prompt = int(stats["num_prompt_tokens"])
    num_cached = sum(int(count) for count in stats["cached_tokens_by_tier"].values())
    hits = num_cached / max(1, num_prompt)
    num_requests = int(divergences["num_requests"])
    if num_requests < _MIN_REQUESTS:
        text = f"{num_requests} requests are too few to advise on; ask again after {_MIN_REQUESTS}."
        return [Advice("worth", text, None, hits, None)]
    evicted, regretted = int(stats["num_evicted_blocks"]), int(stats.get("num_regretted_blocks", 0))
    found = [_worth(hits, evicted), _memory(hits, evicted, regretted, stats)]
    for one in divergences["divergences"][:3]:
        if one.get("saved_tokens"):
            after = hits + int(one["saved_tokens"]) / max(1, int(divergences["num_prompt_tokens"]))
            found.append(
                Advice("prompts", str(one["advice"]), None, hits, min(1.0, after), one.get("saved_s"))
            )
    return found


def _worth(hits: float, num_evicted: int) -> Advice:
    if hits >= _LOW_HITS:
        text = f"The cache is worth it: {hits:.1%} of prompt tokens came from it."
        return Advice("worth", text, None, hits, hits)
    if num_evicted:
        text = (
            f"Only {hits:.1%} of prompt tokens came from the cache, which had to evict. Record the traffic "
            "(--record-trace) and ask `stemma advise TRACE` whether more memory would change that."
        )
        return Advice("worth", text, "record_trace", hits, None)
    text = (
        f"Only {hits:.1%} of prompt tokens came from the cache, and nothing was evicted: prompts don't "
        "repeat. Switch the cache off, or look at what they part at."
    )
    return Advice("worth", text, "enable_prefix_cache = false", hits, 0.0)


def _memory(hits: float, num_evicted: int, num_regretted: int, stats: dict[str, Any]) -> Advice:
    if not num_evicted:
        return Advice("memory", "Memory is enough: nothing was evicted from the device.", None, hits, hits)
    share = num_regretted / num_evicted
    if share < _HIGH_REGRET:
        text = f"Memory is nearly enough: {share:.1%} of evicted blocks were needed again within a minute."
        return Advice("memory", text, None, hits, None)
    has_lower = bool((stats.get("transfer") or {}).get("tiers"))
    text = (
        f"More memory would help: {share:.1%} of the {num_evicted:,} evicted device blocks were needed again "
        "within a minute. How much it would bring, `stemma advise` says of a recorded trace."
    )
    return Advice(
        "memory", text, "kv_cache_memory" if has_lower else "host_cache, kv_cache_memory", hits, None
    )
