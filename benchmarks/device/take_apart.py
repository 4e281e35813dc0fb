"""Say where a step's time goes on a GPU: `python -m benchmarks.device.take_apart --json FILE`.

The card's limits at the model's own shapes, the price of a launch, and for decode, a prefix hit and
prefill: wall time, host time, time of all kernels, their number, and those that take most. Then whether
bits agree: one prompt whole, in chunks, behind its cached prefix, decoded, beside others. `--path`: today's
modules; `listed`, the same modules by recordings of any step; `fused`, layers of ours by these recordings.
`--device cpu --shapes tiny` is a dry run of the script itself: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from benchmarks.device.headless import HeadlessModules
from benchmarks.device.recorded import record, replay
from benchmarks.gpu import SHAPES, Bench, Shape, Timer
from stemma.model.cuda.fused import LayoutDecoder
from stemma.model.cuda.fused_steps import FusedModel
from stemma.model.cuda.graphs import CudaGraphRecorder
from stemma.model.cuda.listed_attention import PieceRoom
from stemma.model.cuda.recorded_steps import RecordedDecoder
from stemma.model.families.registry import family_of
from stemma.model.weights.named import NamedWeights

_PRODUCTS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28_672, 4096),
    "down": (4096, 14_336),
    "head": (128_256, 4096),
}
"""Weights of an 8B."""
_CARD = "name,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"


class Report:
    """Answers by name, printed and written as they come."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._answers: dict[str, object] = {}

    def say(self, name: str, value: object) -> None:
        """Note one answer."""
        self._answers[name] = value
        print(f"{name:58} {value}", flush=True)
        if self._file is not None:
            self._file.write_text(json.dumps(self._answers, indent=1))


class TakenApart:
    """Measures on one device."""

    def __init__(self, device: torch.device, timer: Timer, report: Report) -> None:
        self._device, self._timer, self._say = device, timer, report.say
        self._is_cuda = device.type == "cuda"

    def card(self, when: str) -> None:
        """Note clocks, power and temperature."""
        if self._is_cuda:
            asked = ["nvidia-smi", f"--query-gpu={_CARD}", "--format=csv,noheader"]
            self._say(f"card, {when}", subprocess.run(asked, capture_output=True, text=True).stdout.strip())

    def limits(self) -> None:
        """Measure copies in memory, and the library's products."""
        self._memory(2**32 if self._is_cuda else 2**24)
        shapes = _PRODUCTS if self._is_cuda else {"small": (64, 64)}
        for num_tokens in (1, 16, 64, 256, 2048, 8192):
            told = [
                self._library(name, n, k, num_tokens)
                for name, (n, k) in shapes.items()
                if name != "head" or num_tokens <= 256
            ]
            self._say(f"library's products, {num_tokens} rows", "; ".join(told))

    def _memory(self, size: int) -> None:
        source = torch.ones(size, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        seconds = self._timer.median_s(lambda: target.copy_(source))
        self._say("copy, GB/s read + written", round(2 * size / seconds / 1e9))
        numbers = source.view(torch.float32)
        self._say("sum of float32, GB/s read", round(size / self._timer.median_s(numbers.sum) / 1e9))

    def _library(self, name: str, n: int, k: int, num_tokens: int) -> str:
        count = max(1, min(8, 2**28 // (2 * n * k)))
        weights = [torch.randn(n, k, device=self._device).bfloat16() for _ in range(count)]
        x = torch.randn(num_tokens, k, device=self._device).bfloat16()
        seconds = self._timer.median_s(lambda: [x @ w.T for w in weights]) / count
        return (
            f"{name} {2 * n * k / seconds / 1e9:.0f} GB/s {2 * n * k * num_tokens / seconds / 1e12:.0f} TF/s"
        )

    def prices(self) -> None:
        """Measure what an operation costs the host, and what a kernel of a recording costs the device."""
        x, linear = torch.zeros(8, device=self._device), torch.nn.Linear(8, 8).to(self._device)
        pinned = torch.zeros(8, pin_memory=self._is_cuda)
        asked: list[tuple[str, Callable[[], object]]] = [
            ("an operation", lambda: x.add_(1)),
            ("a module", lambda: linear(x)),
            ("a pinned copy", lambda: x.copy_(pinned, non_blocking=True)),
        ]
        for name, work in asked:
            self._say(f"host us: {name}", round(self._host_s(work) * 1e6, 1))
        if self._is_cuda:
            for count in (100, 1000):
                self._recorded(x, count)
            for num_kb in (64, 256, 768, 2048, 8192):
                self._copies(num_kb)

    def _host_s(self, work: Callable[[], object], count: int = 300) -> float:
        self._timer.sync()
        start = time.perf_counter()
        for _ in range(count):
            work()
        seconds = time.perf_counter() - start
        self._timer.sync()
        return seconds / count

    def _recorded(self, x: torch.Tensor, count: int) -> None:
        device_s, host_s = replay(record(lambda: [x.add_(1) for _ in range(count)]))
        found = [round(device_s * 1e6 / count, 2), round(host_s * 1e6)]
        self._say(f"recording of {count} empty kernels: us each, host us to launch", found)

    def _copies(self, num_kb: int, count: int = 64) -> None:
        host = torch.empty(count, num_kb * 1024, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=self._device)

        def move(to: torch.Tensor, of: torch.Tensor) -> float:
            pairs = list(zip(to, of, strict=True))
            seconds = self._timer.median_s(lambda: [a.copy_(b, non_blocking=True) for a, b in pairs])
            return round(count * num_kb * 1024 / seconds / 1e9, 1)

        self._say(
            f"{count} pinned copies of {num_kb} kB, GB/s up, down", [move(there, host), move(host, there)]
        )

    def step(self, name: str, work: Callable[[], object]) -> None:
        """Take one step apart."""
        found: dict[str, object] = {"wall_ms": round(self._timer.median_s(work) * 1e3, 3)}
        found["host_ms"] = round(self._host_s(work, 1) * 1e3, 3)
        if self._is_cuda:
            start = time.perf_counter()
            for _ in range(20):
                work()
            self._timer.sync()
            found["in_a_row_ms"] = round((time.perf_counter() - start) / 20 * 1e3, 3)
            found |= self._kernels(work)
        self._say(name, found)

    def _kernels(self, work: Callable[[], object]) -> dict[str, object]:
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            self._timer.sync()
        for event in profile.events() or ():
            if event.device_type == DeviceType.CUDA:
                times[event.name[:44]] += round(event.device_time_total)
                counts[event.name[:44]] += 1
        top = [f"{us / 1e3:.2f} ms x{counts[name]} {name}" for name, us in times.most_common(8)]
        return {"kernels": counts.total(), "kernel_ms": round(times.total() / 1e3, 3), "top": top}

    def model(self, name: str, shape: Shape, path: str) -> None:
        """Take the steps of one model apart, and ask for its bits."""
        start = time.perf_counter()
        bench = Bench(shape, self._device, self._timer, use_graphs=True)
        self._say(f"{name}: made in s", round(time.perf_counter() - start, 1))
        name = f"{name} {path}"
        if path != "modules":
            start = time.perf_counter()
            decoder = bench.model.decoder = recorded_decoder(bench, path)
            if self._is_cuda:
                decoder.warm_up(bench.kv, lambda _share: None)
            seconds = round(time.perf_counter() - start, 1)
            self._say(f"{name}: s to bring and record; recordings", [seconds, len(decoder.recorded)])
        for what, queries, contexts in _steps(shape, is_cuda=self._is_cuda):
            work = partial(bench.model.forward, bench.batch(queries, contexts), bench.kv)
            start = time.perf_counter()
            work()
            self._timer.sync()
            self._say(f"{name}: first {what}, s (compiles, records)", round(time.perf_counter() - start, 2))
            self.step(f"{name}: {what}", work)
        for way, found in Bits(bench, 2048 if self._is_cuda else 96).ask():
            self._say(f"{name}: {way}", found)
        if self._is_cuda:
            self._say(f"{name}: peak memory GB", round(torch.cuda.max_memory_allocated() / 1e9, 1))


def _steps(shape: Shape, *, is_cuda: bool) -> list[tuple[str, list[int], list[int]]]:
    """Return steps: a name, numbers of queries, and of tokens with them. Most telling first."""
    cached = (shape.cached, 32) if is_cuda else (96, 8)
    num, context = shape.decodes[-1]
    steps = [(f"{cached[0]} cached + {cached[1]}", [cached[1]], [cached[0]])]
    steps += [(f"decode {n} x {c}", [1] * n, [c] * n) for n, c in shape.decodes]
    rows = 64 if is_cuda else 8
    mixed = f"decode {num} x {context} beside {rows} rows of a prompt"
    steps.append((mixed, [*[1] * num, rows], [*[context] * num, context]))
    return steps + [(f"prompt of {n}", [n], [n]) for n in sorted({min(2048, shape.prefill), shape.prefill})]


def recorded_decoder(bench: Bench, path: str) -> RecordedDecoder:
    """Return what runs the bench's model by recordings of any step: its modules, or a fused decoder."""
    device = bench.model.device
    is_cuda = device.type == "cuda"
    recorder = CudaGraphRecorder() if is_cuda else None
    room = PieceRoom.on(device) if is_cuda else PieceRoom(1, 64)
    if path == "listed":
        return RecordedDecoder(HeadlessModules(bench.hf), room, recorder)
    family = family_of("llama")
    assert family is not None
    assert family.layout is not None
    layout = family.layout(bench.hf.config, 2 * bench.shape.cached)
    assert layout is not None
    weights = NamedWeights(bench.hf.state_dict(), torch.bfloat16, lambda _name, _numbers: None)
    fused = LayoutDecoder(layout, weights, torch.bfloat16, device, max_positions=2 * bench.shape.cached)
    return RecordedDecoder(FusedModel(fused, device), room, recorder)


class Bits:
    """Logits of the last token of one prompt, computed in several ways."""

    def __init__(self, bench: Bench, num_tokens: int) -> None:
        self._bench, self._num_tokens = bench, num_tokens
        device = bench.model.device
        generator = torch.Generator().manual_seed(5)
        self._tokens = torch.randint(3, bench.shape.vocab, (num_tokens,), generator=generator).to(device)
        self._whole = bench.batch([num_tokens], [num_tokens])
        self._whole.token_ids = self._tokens

    def ask(self) -> Iterator[tuple[str, str]]:
        """Yield for each way whether its bits are those of the prompt computed at once."""
        count = self._num_tokens
        cold = self._span(0, count)
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "again": lambda: self._span(0, count),
            "chunks of a quarter": lambda: self._chunks(count // 4),
            "cached, 32 new": lambda: self._span(count - 32, count),
            "cached, 1 new": lambda: self._span(count - 1, count),
            "decoded beside 7": lambda: self._beside([1] * 7),
            "decoded beside 31": lambda: self._beside([1] * 31),
            "decoded beside chunks of 5 and a third": lambda: self._beside([5, count // 3]),
        }
        for way, make in ways.items():
            yield f"bits, {way}", _compared(make(), cold)

    def _span(self, start: int, end: int) -> torch.Tensor:
        batch, whole = self._bench.batch([end - start], [end]), self._whole
        batch.token_ids = self._tokens[start:end]
        batch.slots = whole.slots[start:end].clone()
        batch.block_tables = whole.block_tables
        return self._bench.model.forward(batch, self._bench.kv)[0].clone()

    def _chunks(self, size: int) -> torch.Tensor:
        last = self._span(0, size)
        for end in range(2 * size, self._num_tokens + 1, size):
            last = self._span(end - size, end)
        return last

    def _beside(self, queries: list[int]) -> torch.Tensor:
        """Decode the last token in a step with other sequences."""
        batch = self._bench.batch([1, *queries], [self._num_tokens] * (1 + len(queries)))
        batch.token_ids[0] = self._tokens[-1]
        batch.block_tables[0] = self._whole.block_tables[0]
        batch.slots[0] = self._whole.slots[-1]
        return self._bench.model.forward(batch, self._bench.kv)[0].clone()


def _compared(got: torch.Tensor, expected: torch.Tensor) -> str:
    if torch.equal(got, expected):
        return "same"
    share = (got != expected).float().mean().item()
    word = "same" if got.argmax() == expected.argmax() else "OTHER"
    largest = (got - expected).abs().max().item()
    return f"differ: {share:.0%} of logits, largest {largest:.2e}, argmax {word}"


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", default=["0.5b", "8b"], choices=SHAPES)
    parser.add_argument("--path", default="modules", choices=["modules", "listed", "fused"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    device = torch.device(given.device)
    apart = TakenApart(device, Timer(device, given.rounds), Report(given.json))
    apart.card("before")
    if given.path == "modules":
        apart.limits()
        apart.prices()
    for name in given.shapes:
        apart.model(name, SHAPES[name], given.path)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    apart.card("after")


if __name__ == "__main__":
    main()
