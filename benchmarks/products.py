"""Products with packed weights against the machine's limits: `python -m benchmarks.products`.

In one run, for every instruction-set level of the processor (or those named with `--isa`): what its
instructions do on registers alone, how fast memory is read, and then, for 1 to 2,048 rows, our products
over the layers of Qwen2.5-0.5B's shape (more weights than caches hold), or of SmolLM2-135M's, beside
oneDNN's (ONEDNN_MAX_CPU_ISA=AVX2 forces it). `limit` is the share of what the machine can do at most: the
time that registers take at least, or memory for plain weights, whichever is longer, by the time measured.
Where weights are compressed it may exceed 1 (`--plain`: they aren't). Each figure is the best of several
rounds in which ours, oneDNN's and the limits take turns; threads as torch has them (`--threads`), weights
in bfloat16 or, with `--dtype float32`, in float32.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from stemma.model.cpu.weights import PackedProduct
from stemma.native.levels import available_levels
from stemma.native.library import Kernels, load_kernels

SHAPES = {
    "qwen2.5-0.5b": (6, ((1152, 896), (896, 896), (4864, 896), (4864, 896), (896, 4864))),
    "smollm2-135m": (30, ((960, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))),
}
"""Layers, and outputs and inputs of query, key and value; output; gate; up; down."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
READ_BYTES = 512 << 20
SPIN_ROUNDS = 200_000


@dataclass(frozen=True)
class Limits:
    """What the machine can do at most, at one level."""

    level: str
    register_gflops: float
    read_gb_s: float

    def or_better(self, other: Limits) -> Limits:
        """Return the higher of each figure."""
        return Limits(
            self.level,
            max(self.register_gflops, other.register_gflops),
            max(self.read_gb_s, other.read_gb_s),
        )


@dataclass(frozen=True)
class Result:
    """Products of `rows` rows with all weights."""

    level: str
    rows: int
    gflops: float
    gb_s: float
    share_of_limit: float
    onednn_gflops: float


def best_s(run: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return min(times)


@cache
def data_to_read() -> torch.Tensor:
    return torch.ones(READ_BYTES, dtype=torch.uint8)


def measure_limits(kernels: Kernels, is_bf16: bool, rounds: int = 1) -> Limits:
    threads = torch.get_num_threads()
    operations = kernels.multiply_registers(SPIN_ROUNDS, is_bf16, threads)
    spin_s = best_s(lambda: kernels.multiply_registers(SPIN_ROUNDS, is_bf16, threads), rounds)
    data = data_to_read()
    read_s = best_s(lambda: kernels.read_memory(data.data_ptr(), READ_BYTES, threads), rounds)
    return Limits(kernels.level, operations / spin_s / 1e9, READ_BYTES / read_s / 1e9)


def onednn_products(weights: list[torch.Tensor]) -> list[Callable[[torch.Tensor], Any]]:
    """Return oneDNN's products over weights that it packed itself, or torch's where that isn't to be had."""
    try:
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]
        multiply = torch.ops.mkldnn._linear_pointwise.default
        return [lambda x, w=w: multiply(x, w, None, "none", [], "") for w in packed]  # type: ignore[misc]
    except (AttributeError, RuntimeError, NotImplementedError):
        return [lambda x, w=w: F.linear(x, w) for w in weights]  # type: ignore[misc]


def measure(
    kernels: Kernels, limits: Limits, weights: list[torch.Tensor], rows: int, *, compressed: bool
) -> tuple[Limits, Result]:
    ours = [PackedProduct(kernels, [weight], compressed=compressed) for weight in weights]
    theirs = onednn_products(weights)
    inputs = {k: torch.randn(rows, k).to(weights[0].dtype) for k in {weight.shape[1] for weight in weights}}
    pairs = [
        (mine, other, inputs[weight.shape[1]])
        for mine, other, weight in zip(ours, theirs, weights, strict=True)
    ]
    our_s = their_s = float("inf")
    for _ in range(9 if rows <= 64 else 4):
        our_s = min(our_s, best_s(lambda: [mine(x) for mine, _, x in pairs], 1))
        their_s = min(their_s, best_s(lambda: [other(x) for _, other, x in pairs], 1))
        limits = limits.or_better(measure_limits(kernels, weights[0].dtype == torch.bfloat16))
    operations = 2 * rows * sum(weight.numel() for weight in weights)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    at_least_s = max(operations / limits.register_gflops, num_bytes / limits.read_gb_s) / 1e9
    return limits, Result(
        level=limits.level,
        rows=rows,
        gflops=operations / our_s / 1e9,
        gb_s=num_bytes / our_s / 1e9,
        share_of_limit=at_least_s / our_s,
        onednn_gflops=operations / their_s / 1e9,
    )


def show(limits: Limits, results: list[Result]) -> None:
    rates = f"registers {limits.register_gflops:,.0f} GF/s, reading {limits.read_gb_s:.1f} GB/s"
    table = Table(title=f"{limits.level}: {rates}")
    for column in ("rows", "GF/s", "GB/s of weights", "limit", "oneDNN GF/s", "ours : oneDNN"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            *(f"{r.rows:,}", f"{r.gflops:,.0f}", f"{r.gb_s:.1f}", f"{r.share_of_limit:.2f}"),
            *(f"{r.onednn_gflops:,.0f}", f"{r.gflops / r.onednn_gflops:.2f}"),
        )
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--isa", action="append", help="a level; may be given several times; default: all")
    parser.add_argument("--rows", type=int, action="append", help="a number of rows; default: 1 to 2,048")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--plain", action="store_true", help="don't compress weights")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype: torch.dtype = getattr(torch, options.dtype)
    num_layers, layers = SHAPES[options.shape]
    weights = [torch.randn(shape).mul_(0.02).to(dtype) for _ in range(num_layers) for shape in layers]
    everything: list[Any] = []
    with torch.inference_mode():
        for name in options.isa or [level.name for level in available_levels()]:
            kernels = load_kernels(name)
            if kernels is None:
                raise SystemExit(f"no native kernels for {name}: nothing to measure")
            limits = measure_limits(kernels, dtype == torch.bfloat16, rounds=7)
            results = []
            for rows in options.rows or ROWS:
                limits, result = measure(kernels, limits, weights, rows, compressed=not options.plain)
                results.append(result)
            show(limits, results)
            everything += [asdict(limits), *map(asdict, results)]
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
