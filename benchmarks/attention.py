"""What attention, linear layers and a whole step cost: `python -m benchmarks.attention [--steps] [--json F]`.

Shapes of Qwen2.5-0.5B (14 query / 2 KV heads of 64) in bf16. First one thread, CPU time of that thread, best
of several: native kernels beside the torch path for attention, packed weights beside `F.linear`. Then all
threads: decode attention beside the machine's read bandwidth, a cold prompt's attention beside its products.
With `--steps`, steps of the 0.5B checkpoint with the native kernels beside those without (transformers'
modules, attention by torch, packed weights in both).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, thread_time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import half_billion_checkpoint
from stemma.config.settings import ModelSettings
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.paged import AttentionStep
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.model.cpu.weights import PackedProduct
from stemma.model.load.loading import load_model
from stemma.native.library import drop_kernels, load_kernels

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 14, 2, 64, 64
LINEARS = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
"""Query, key and value; output; gate and up; down: rows and columns of one layer's weights."""
NUM_LAYERS = 24


@dataclass(frozen=True)
class Case:
    """One batch: context length and number of new tokens of each sequence, and blocks they share."""

    name: str
    context_lens: list[int]
    num_queries: list[int]
    shared_blocks: int = 0


CASES = (
    Case("decode, batch 1, context 64", [64], [1]),
    Case("decode, batch 1, context 1024", [1024], [1]),
    Case("decode, batch 1, context 8192", [8192], [1]),
    Case("decode, batch 8, context 1024", [1024] * 8, [1] * 8),
    Case("decode, batch 32, context 1024", [1024] * 32, [1] * 32),
    Case("decode, batch 32, context 32 to 2048", [2048 * (i + 1) // 32 - 32 for i in range(1, 32)], [1] * 31),
    Case("decode, 16 over one prefix of 4096", [4160] * 16, [1] * 16, shared_blocks=64),
    Case("decode, 16 of 4160, nothing shared", [4160] * 16, [1] * 16),
    Case("8 new tokens over 1024", [1024], [8]),
    Case("32 new tokens over 2048", [2080], [32]),
    Case("512 new tokens over 512", [1024], [512]),
    Case("cold prompt of 512", [512], [512]),
    Case("cold prompt of 2048", [2048], [2048]),
)
STEPS = (CASES[0], Case("decode, batch 8, context 2048", [2048] * 8, [1] * 8), CASES[9], CASES[11])


@dataclass(frozen=True)
class Result:
    """Milliseconds of the faster way and of the plain one."""

    what: str
    ms: float
    plain_ms: float

    @property
    def ratio(self) -> float:
        """Below 1 is a gain."""
        return self.ms / self.plain_ms


def best_ms(run: Callable[[], object], rounds: int = 7) -> float:
    """Return the least CPU time of several runs, after one to warm up."""
    run()
    times = []
    for _ in range(rounds):
        start = thread_time()
        run()
        times.append(thread_time() - start)
    return min(times) * 1e3


def make_batch(case: Case) -> tuple[ForwardBatch, int]:
    """Return the batch and how many blocks it needs."""
    needs = [-(-length // BLOCK_SIZE) for length in case.context_lens]
    order = torch.randperm(sum(needs), generator=torch.Generator().manual_seed(0)).tolist()
    tables = torch.zeros(len(needs), max(needs), dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for row, need in enumerate(needs):
        for index in range(need):
            shared = row > 0 and index < case.shared_blocks
            tables[row, index] = tables[0, index] if shared else order.pop()
        length = case.context_lens[row]
        for position in range(length - case.num_queries[row], length):
            positions.append(position)
            block = int(tables[row, position // BLOCK_SIZE])
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(positions))
    batch = ForwardBatch(
        token_ids=torch.arange(len(positions)) % 1000 + 10,
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=starts,
        context_lens=case.context_lens,
        block_tables=tables,
        logits_rows=torch.tensor([start - 1 for start in starts[1:]]),
    )
    return batch, sum(needs)


def bench_attention(case: Case) -> Result:
    """Time one layer's KV write and attention, planning left out (it is done once a step)."""
    kernels = load_kernels()
    if kernels is None:
        raise SystemExit("no native kernels on this machine: nothing to compare")
    batch, num_blocks = make_batch(case)
    kv = DeviceKV(KVLayout(1, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, "bfloat16"), num_blocks)
    kv.data.normal_()
    tokens = len(batch.positions)
    query = torch.randn(tokens, HEADS, HEAD_DIM).bfloat16()
    new = torch.randn(2, tokens, KV_HEADS, HEAD_DIM).bfloat16()
    call = AttentionCall(0, HEAD_DIM**-0.5, None, None, None)
    plain = AttentionStep(batch, kv)
    with NativeAttentionStep(batch, kv, kernels) as native:
        return Result(
            case.name,
            best_ms(lambda: native.attend(call, query, new[0], new[1])),
            best_ms(lambda: plain.attend(call, query, new[0], new[1])),
        )


def best_s(run: Callable[[], object], rounds: int = 7) -> float:
    """Return the least wall time of several runs, after one to warm up."""
    run()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return min(times)


def bench_limits(num_threads: int) -> list[tuple[str, float, str]]:
    """Hold attention against the machine, with all threads: what, ratio, the two figures behind it."""
    torch.set_num_threads(num_threads)
    kernels = load_kernels()
    assert kernels is not None
    memory = torch.ones(1 << 29, dtype=torch.uint8)
    bandwidth = memory.nbytes / best_s(
        lambda: kernels.read_memory(memory.data_ptr(), memory.nbytes, num_threads)
    )

    def attention_s(case: Case) -> float:
        batch, num_blocks = make_batch(case)
        kv = DeviceKV(KVLayout(1, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, "bfloat16"), num_blocks)
        kv.data.normal_()
        query = torch.randn(len(batch.positions), HEADS, HEAD_DIM).bfloat16()
        new = torch.randn(2, len(batch.positions), KV_HEADS, HEAD_DIM).bfloat16()
        call = AttentionCall(0, HEAD_DIM**-0.5, None, None, None)
        with NativeAttentionStep(batch, kv, kernels) as native:
            return best_s(lambda: native.attend(call, query, new[0], new[1]))

    lines = []
    for case in (CASES[3], Case("decode, batch 8, context 4096", [4096] * 8, [1] * 8), CASES[7]):
        rate = sum(case.context_lens) * 2 * KV_HEADS * HEAD_DIM * 2 / attention_s(case)
        figures = f"{rate / 1e9:.1f} of {bandwidth / 1e9:.1f} GB/s"
        lines.append((f"{case.name}: of read bandwidth", rate / bandwidth, figures))
    packed = [PackedProduct(kernels, [torch.randn(shape).mul_(0.02).bfloat16()]) for shape in LINEARS]
    inputs = [torch.randn(2048, shape[1]).bfloat16() for shape in LINEARS]
    products = best_s(lambda: [product(x) for product, x in zip(packed, inputs, strict=True)], 3)
    attention = attention_s(CASES[-1])
    figures = f"{attention * 1e3:.1f} of {products * 1e3:.1f} ms a layer"
    lines.append((f"{CASES[-1].name}: of its products' time", attention / products, figures))
    return lines


def bench_linears(num_tokens: int) -> Result:
    """Time the linear layers of the whole model."""
    kernels = load_kernels()
    assert kernels is not None
    weights = [torch.randn(shape).mul_(0.02).bfloat16() for _ in range(NUM_LAYERS) for shape in LINEARS]
    packed = [PackedProduct(kernels, [weight]) for weight in weights]
    inputs = [torch.randn(num_tokens, shape[1]).bfloat16() for shape in LINEARS] * NUM_LAYERS
    pairs = list(zip(packed, inputs, strict=True))
    plain = list(zip(weights, inputs, strict=True))
    rounds = 5 if num_tokens < 256 else 2
    return Result(
        f"linear layers, {num_tokens} tokens",
        best_ms(lambda: [layer(x) for layer, x in pairs], rounds),
        best_ms(lambda: [F.linear(x, weight) for weight, x in plain], rounds),
    )


def bench_steps() -> list[Result]:
    """Time whole forward passes of the 0.5B checkpoint with and without native kernels."""
    settings = ModelSettings(path=half_billion_checkpoint(), dtype="bfloat16", device="cpu", num_threads=1)
    times: list[list[float]] = []
    for native in ("1", "0"):
        os.environ["STEMMA_NATIVE"] = native
        drop_kernels()
        model = load_model(settings)
        times.append([])
        for case in STEPS:
            batch, num_blocks = make_batch(case)
            kv = DeviceKV(model.layout(BLOCK_SIZE), num_blocks)
            times[-1].append(best_ms(lambda m=model, b=batch, k=kv: m.forward(b, k), 5))  # type: ignore[misc]
    return [
        Result(f"step: {case.name}", *pair)
        for case, pair in zip(STEPS, zip(*times, strict=True), strict=True)
    ]


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", action="store_true", help="also whole steps of the 0.5B checkpoint")
    options = parser.parse_args()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        results = [bench_attention(case) for case in CASES]
        results += [bench_linears(num_tokens) for num_tokens in (1, 8, 32, 256)]
    if options.steps:
        results += bench_steps()
    table = Table("what", "ms", "plain ms", "ratio")
    for result in results:
        table.add_row(result.what, f"{result.ms:.3f}", f"{result.plain_ms:.3f}", f"{result.ratio:.2f}")
    Console().print(table)
    with torch.inference_mode():
        for what, ratio, figures in bench_limits(num_threads):
            Console().print(f"{what}: {ratio:.2f} ({figures})")
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
