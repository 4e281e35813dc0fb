"""Contexts of 8k to 128k tokens beside the machine's limits: `python -m benchmarks.long_contexts`.

Random weights of SmolLM2-135M's shape, and of a small model over DeepSeek's latents (16 heads over latents of
512), in bf16. `cold`, `latent`: a fresh prompt's milliseconds a token, beside its products and its attention
at what registers do. `decode`: a step of 1 and 8 rows over KV that nothing shares, beside reading weights and
KV once at the machine's bandwidth, or over latents beside attention's products if these take longer; on 6 of
the 30 layers, so that 8 times 128k fit. `disk`: the first token behind 100,000 tokens that a former engine
left on disk, pages dropped, beside reading the same files (6 layers): in an engine that has just begun, and
after the idle time that a server has before its first request. `behind`: a step of 16 to 256 tokens of one
prompt behind 100,000, beside their attention (6 layers, of which the last attends for one token).

`--only cold|latent|decode|disk|behind`, `--lengths 8192,32768,131072`, `--threads N`. `--layers N` cuts the
models of fresh prompts, where all of their layers take too long: time and limit shrink alike. Run it on a
quiet machine.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.attention import Case, make_batch
from benchmarks.checkpoint import VOCAB_SIZE, latent_checkpoint, long_checkpoint
from benchmarks.products import Limits, measure_limits
from benchmarks.tiers import drop_pages, read_plainly, serve, timed_s
from stemma.config.settings import ModelSettings
from stemma.engine.build import EngineParts, build_engine
from stemma.engine.llm import engine_settings
from stemma.memory.device.kv import DeviceKV
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.native.library import load_kernels
from stemma.types import TokenArray

BLOCK_SIZE = 64
SHALLOW, DEEP, LATENT = 6, 30, 8
ON_DISK = 100_000
NUM_NEW = 32
KV_BYTES = 4_500_000_000
PAIR = 9 * 4 * 64
"""Operations of a query and a key in one layer of SmolLM2's shape: 9 heads."""
LATENT_PAIR = 16 * 2 * (512 + 64 + 512)
"""Operations of a query and a key over latents, absorbed, in one layer: 16 heads."""


@dataclass(frozen=True)
class Row:
    """One measurement beside its limit."""

    name: str
    seconds: float
    limit_s: float
    note: str


@dataclass(frozen=True)
class Depth:
    """The layers that are computed, of those that the model has."""

    layers: int
    full: int

    @property
    def whole(self) -> int:
        """Return how many compute all tokens: the last one makes their KV, and computes one."""
        return self.layers - 1

    def __str__(self) -> str:
        return "" if self.layers == self.full else f", {self.layers} of {self.full} layers"


@dataclass(frozen=True)
class Options:
    """What is measured, and on what."""

    lengths: list[int]
    limits: Limits
    directory: Path
    layers: int | None = None
    """How many layers compute fresh prompts; None: all."""

    def depth(self, full: int) -> Depth:
        """Return how much of a model of `full` layers computes fresh prompts."""
        return Depth(max(2, min(self.layers or full, full)), full)


def tokens(num_tokens: int, seed: int) -> TokenArray:
    """Return random ids."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE - 64, num_tokens).astype(np.int32)


def cold(options: Options) -> Iterator[Row]:
    """Fresh prompts on SmolLM2's shape."""
    depth = options.depth(DEEP)
    hidden, inner, heads, kv_heads, size = 576, 1536, 9, 3, 64
    weights = depth.whole * (2 * hidden * size * (heads + kv_heads) + 3 * hidden * inner)
    a_pair = depth.whole * PAIR
    yield from _cold(long_checkpoint(depth.layers), depth, weights, a_pair, options)


def latent(options: Options) -> Iterator[Row]:
    """Fresh prompts over latents, beside the products that they take absorbed, and would take expanded."""
    depth = options.depth(LATENT)
    hidden, inner, heads = 1024, 2816, 16
    rank, rope, nope, value = 512, 64, 128, 128
    projections = hidden * heads * (nope + rope) + hidden * (rank + rope) + heads * value * hidden
    absorbing = heads * rank * (nope + value)
    weights = depth.whole * (projections + absorbing + 3 * hidden * inner)
    a_pair = depth.whole * LATENT_PAIR
    expanded = depth.whole * heads * 2 * (nope + rope + value)
    rows = _cold(latent_checkpoint(depth.layers), depth, weights, a_pair, options)
    for length, row in zip(options.lengths, rows, strict=True):
        less_s = (a_pair - expanded) * length**2 / 2 / (options.limits.register_gflops * 1e9)
        note = f"{row.note}; expanded at least {1e3 * (row.limit_s - less_s) / length:.2f} ms"
        yield Row(f"latents, {row.name}", row.seconds, row.limit_s, note)


def _cold(
    path: Path, depth: Depth, num_weights: int, pair_operations: int, options: Options
) -> Iterator[Row]:
    parts = build_engine(engine_settings(path, kv_cache_memory=KV_BYTES, speculation="off"))
    serve(parts, tokens(256, 0), 1)
    for length in options.lengths:
        seconds, _ = serve(parts, tokens(length, length), 1)
        operations = 2 * num_weights * length + pair_operations * length**2 / 2
        limit_s = operations / (options.limits.register_gflops * 1e9)
        a_token = 1e3 * seconds / length
        note = f"{a_token:.3f} ms a token, {1e3 * a_token / depth.whole:.1f} µs a layer of it"
        note += f", at least {1e3 * limit_s / length:.3f} ms"
        yield Row(f"cold prompt of {length:,}{depth}", seconds, limit_s, note)
        parts.engine.cache.flush()
    parts.engine.close()


def decode(options: Options) -> Iterator[Row]:
    """Steps over random KV, none of it shared."""
    of_latents = ("latents, ", latent_checkpoint(LATENT), LATENT * LATENT_PAIR)
    for name, path, a_pair in (("", long_checkpoint(SHALLOW), 0), of_latents):
        model = load_model(ModelSettings(path=path, dtype="bfloat16", device="cpu"))
        for length in options.lengths:
            for rows in (1, 8):
                seconds = _step_s(model, Case("", [length] * rows, [1] * rows))
                num_bytes = model.weight_bytes + rows * length * model.layout(BLOCK_SIZE).bytes_per_token
                read_s = num_bytes / (options.limits.read_gb_s * 1e9)
                multiply_s = a_pair * rows * length / (options.limits.register_gflops * 1e9)
                note = f"{num_bytes / 1e9:.2f} GB at {options.limits.read_gb_s:.1f} GB/s: {read_s:.3f} s"
                yield Row(f"{name}decode of {rows} at {length:,}", seconds, max(read_s, multiply_s), note)


def behind(options: Options) -> Iterator[Row]:
    """Steps of some tokens of one prompt, the others of which are cached."""
    model = load_model(ModelSettings(path=long_checkpoint(SHALLOW), dtype="bfloat16", device="cpu"))
    for num_new in (16, 32, 64, 256):
        seconds = _step_s(model, Case("", [ON_DISK + num_new], [num_new]))
        limit_s = (SHALLOW - 1) * PAIR * num_new * ON_DISK / (options.limits.register_gflops * 1e9)
        yield Row(f"{num_new} tokens behind {ON_DISK:,}", seconds, limit_s, "attention alone")


def _step_s(model: CausalLM, case: Case) -> float:
    """Return the seconds of a step over random KV, the least of five."""
    batch, num_blocks = make_batch(case)
    kv = DeviceKV(model.layout(BLOCK_SIZE), num_blocks)
    kv.data.normal_()
    model.forward(batch, kv)
    return min(timed_s(lambda: model.forward(batch, kv)) for _ in range(5))


def disk(options: Options) -> Iterator[Row]:
    """The first token of a prompt whose KV lies on disk."""
    folder = Path(tempfile.mkdtemp(dir=options.directory))
    prompt = tokens(ON_DISK + NUM_NEW, 1)
    first = _with_disk(folder)
    serve(first, prompt[:ON_DISK], 1)
    first.engine.close()
    files = [file for file in folder.rglob("slab-*") if file.is_file()]
    num_bytes = sum(file.stat().st_blocks * 512 for file in files)
    plain: list[float] = []
    ours: dict[str, list[float]] = {"an engine just begun": [], "one that was idle": []}
    for _ in range(3):
        for name, times in ours.items():
            drop_pages(files)
            plain.append(sum(timed_s(partial(read_plainly, file)) for file in files))
            second = _with_disk(folder)
            serve(second, tokens(256, 0), 1)
            while name == "one that was idle" and second.engine.use_idle_time() == 0:
                pass
            drop_pages(files)
            times.append(serve(second, prompt, 1)[0])
            second.engine.close()
            _settle()
    shutil.rmtree(folder)
    for name, times in ours.items():
        note = f"{name}; {num_bytes / 1e9:.2f} GB"
        yield Row(f"first token behind {ON_DISK:,} on disk", min(times), min(plain), note)


def _with_disk(folder: Path) -> EngineParts:
    tiers = {"disk_cache": folder, "disk_cache_size": 2 * KV_BYTES, "load_when": "always"}
    path = long_checkpoint(SHALLOW)
    return build_engine(engine_settings(path, kv_cache_memory=KV_BYTES, speculation="off", **tiers))


def _settle() -> None:
    """Wait until what an engine wrote at its end is on disk: it would be read beside it."""
    time.sleep(1.0)


PARTS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "cold": cold,
    "latent": latent,
    "decode": decode,
    "disk": disk,
    "behind": behind,
}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--lengths", default="8192,32768,131072")
    parser.add_argument("--layers", type=int, help="of fresh prompts' models; default: all")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="disk to measure")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    kernels = load_kernels()
    if kernels is None:
        raise SystemExit("no native kernels on this machine: nothing to measure")
    limits = measure_limits(kernels, is_bf16=True, rounds=5)
    options = Options([int(one) for one in args.lengths.split(",")], limits, args.dir, args.layers)
    title = (
        f"{limits.level}: registers {limits.register_gflops:,.0f} GF/s, reading {limits.read_gb_s:.1f} GB/s"
    )
    table = Table("what", "s", "limit, s", "limit : ours", "", title=title)
    with torch.inference_mode():
        for name, part in PARTS.items():
            if args.only in (None, name):
                for row in part(options):
                    figures = (f"{row.seconds:.3f}", f"{row.limit_s:.3f}", f"{row.limit_s / row.seconds:.2f}")
                    table.add_row(row.name, *figures, row.note)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
