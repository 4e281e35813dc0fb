"""`stemma plan`: how much memory, and in which tier, pays for this traffic?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stemma.cli.json_file import write_json
from stemma.cli.progress import StepCounter, open_progress
from stemma.config.sizes import format_size, parse_size
from stemma.errors import ConfigError
from stemma.memory.device.layout import KVLayout
from stemma_lab.admission import ADMISSIONS
from stemma_lab.commands.pool import layout_of
from stemma_lab.commands.replay import load_trace
from stemma_lab.plan import NextGigabyte, Prediction, TierBytes, Workload, curve, next_gigabyte, predict
from stemma_lab.savings import PrefillModel, Prices
from stemma_lab.tiers import SHARINGS

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def command(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory or config.json.")],
    trace: Annotated[Path, typer.Option(help="Trace of the traffic to plan for.")],
    gpu_memory: Annotated[str, typer.Option(help="Device memory for KV, after weights, e.g. 40GB.")],
    dram: Annotated[str, typer.Option(help="Host memory for KV.")] = "0",
    ssd: Annotated[str, typer.Option(help="Disk for KV.")] = "0",
    kv_dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16, float32, int8 or fp8; default: the checkpoint's.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = "hazard",
    sharing: Annotated[str, typer.Option(help=f"How tiers share blocks: {', '.join(SHARINGS)}.")] = "auto",
    admission: Annotated[
        str, typer.Option(help="What moves down: all (as in a server), reused, adaptive.")
    ] = "all",
    dram_speed: Annotated[str, typer.Option(help="Bytes per second from host to device.")] = "20GB",
    ssd_speed: Annotated[str, typer.Option(help="Bytes per second from disk to device.")] = "3GB",
    packed: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=1.0,
            help="Share of its bytes that a block takes in DRAM and on SSD: 0.67 for bf16 on CPU.",
        ),
    ] = 1.0,
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1e-6, help="Speed of prefill.")] = 10_000.0,
    attention_equal_at: Annotated[
        float, typer.Option(min=1.0, help="Position at which attending costs as much as the weights.")
    ] = 32_768.0,
    price_miss: Annotated[float, typer.Option(min=0.0, help="Per million prompt tokens computed.")] = 1.0,
    price_hit: Annotated[float, typer.Option(min=0.0, help="Per million prompt tokens from cache.")] = 0.1,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first N requests.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write as JSON.")] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the curves as a picture.")
    ] = None,
) -> None:
    """Predict hit ratio, time to first token and cost of tiers of given sizes for recorded traffic."""
    console = Console(highlight=False)
    if sharing not in SHARINGS or admission not in ADMISSIONS:
        raise ConfigError(f"unknown sharing or admission: {sharing!r}, {admission!r}")
    columns = load_trace(console, trace, None, False, None, limit)
    layout = layout_of(model, kv_dtype)
    workload = Workload(
        columns,
        layout.bytes_per_token,
        PrefillModel(prefill_tokens_per_s, attention_equal_at),
        Prices(price_miss, price_hit),
        policy,
        sharing,
        admission,
        packed,
    )
    tiers = parse_tiers((gpu_memory, dram, ssd), (dram_speed, ssd_speed))
    with open_progress("replaying") as progress:
        counter = StepCounter(progress, "replaying", 2 + sum(bool(tier.capacity_bytes) for tier in tiers))
        base = predict(workload, tiers)
        counter.advance()
        gains = next_gigabyte(workload, tiers, base)
        counter.advance()
        with_bytes = [number for number, tier in enumerate(tiers) if tier.capacity_bytes]
        curves = {
            tiers[number].name: curve(workload, tiers, number, _FACTORS)
            for number in counter.over(with_bytes)
        }
    _print(console, layout, workload, base, gains, curves)
    if json_path is not None:
        data = {"bytes_per_token": workload.bytes_per_token, "block_bytes": workload.block_bytes}
        figures = {**data, "base": base, "next_gigabyte": gains, "curves": curves}
        write_json(json_path, columns.version.on(figures))
    if html_path is not None:
        from stemma_lab.plan_html import write_plan_report  # plotly is an extra

        write_plan_report(html_path, workload, base, gains, curves)
        console.print(f"curves: {html_path}")


def parse_tiers(sizes: tuple[str, str, str], speeds: tuple[str, str]) -> tuple[TierBytes, ...]:
    """Return the tiers of these sizes, the device first; `speeds`: of reads from host and disk."""
    read_speeds = (math.inf, *(float(parse_size(speed)) for speed in speeds))
    return tuple(
        TierBytes(name, parse_size(size), speed)
        for name, size, speed in zip(("device", "host", "disk"), sizes, read_speeds, strict=True)
    )


def _print(
    console: Console,
    layout: KVLayout,
    workload: Workload,
    base: Prediction,
    gains: list[NextGigabyte],
    curves: dict[str, list[Prediction]],
) -> None:
    kind = "one latent" if layout.num_parts == 1 else f"K and V of {layout.num_kv_heads} heads"
    kept = f"{layout.num_layers} layers, {kind} of {layout.head_dim}"
    if layout.compressed is not None:
        kept = f"entries of {len(layout.compressed.layers)} layers"
    console.print(f"KV of a token: {workload.bytes_per_token:,} bytes ({kept})")
    table = Table(title=f"{workload.trace.version}: tiers", title_justify="left")
    for name in ("tier", "size", "tokens", f"blocks of {workload.trace.block_size}", "token hit ratio"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for tier, ratio in zip(base.tiers, base.token_hit_ratios, strict=True):
        num_blocks = workload.blocks_in(tier.capacity_bytes, is_below=tier.name != "device")
        num_tokens = num_blocks * workload.trace.block_size
        table.add_row(
            tier.name, format_size(tier.capacity_bytes), f"{num_tokens:,}", f"{num_blocks:,}", f"{ratio:.4f}"
        )
    console.print(table)
    console.print(
        f"together: token hit ratio {base.token_hit_ratio:.4f}, time to first token "
        f"{base.ttft_mean_s:.3f} s on average and {base.ttft_p90_s:.3f} s at p90 (no queueing), "
        f"cost {base.cost:,.2f}"
    )
    sizes = Table(title="tier by tier, the others as they are", title_justify="left")
    for name in ("tier", "size", "token hit ratio", "TTFT mean", "TTFT p90", "cost"):
        sizes.add_column(name, justify="left" if name == "tier" else "right")
    for number, tier in enumerate(base.tiers):
        for point in curves.get(tier.name, []):
            sizes.add_row(
                tier.name,
                format_size(point.tiers[number].capacity_bytes),
                f"{point.token_hit_ratio:.4f}",
                f"{point.ttft_mean_s:.3f} s",
                f"{point.ttft_p90_s:.3f} s",
                f"{point.cost:,.2f}",
            )
    console.print(sizes)
    for gain in gains:
        console.print(
            f"one more GB of {gain.tier}: {gain.token_hit_gain:+.6f} hit ratio, "
            f"{gain.prefill_s_saved:,.2f} s less prefill, "
            f"{1000 * gain.ttft_mean_s_saved:.3f} ms less to first token"
        )
    console.print(f"the next gigabyte helps most in: [bold]{gains[0].tier}[/bold]")
