"""Stemma on a GPU against the limits of that GPU: `python -m benchmarks.gpu`.

Models of 0.5B and 8B shape with random bf16 weights, made on the device. Each figure is a ratio to a limit
that is measured in the same run: the rate of copies in device memory, of matrix products, of pinned copies.

- decode: bytes a step must read (weights, KV of all contexts) over its time, against the memory's rate.
- prefill: operations of the products and of causal attention over its time, against the products' rate.
- hit: time to first token of a prompt of which 32k tokens are cached, against the same prompt cold.
- upload: blocks from pinned host memory to the device, against one large pinned copy; and what decode
  loses while uploads run beside it.

Options: `--json FILE`, `--shapes 0.5b 8b`, `--no-graphs`. `--device cpu --shapes tiny` is a dry run of the
script itself: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from stemma.config.settings import CacheSettings, SchedulerSettings
from stemma.engine.api import GenerationRequest
from stemma.engine.cache_parts import make_index
from stemma.engine.core.engine import Engine
from stemma.engine.core.request import Limits
from stemma.engine.core.runner import Runner
from stemma.engine.sampling.params import SamplingParams
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.pinned import host_rows
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cuda.execution import make_cuda_decoder
from stemma.model.foreign.attention import use_paged_attention
from stemma.model.foreign.decoder import ModuleDecoder
from stemma.model.foreign.probe import probe
from stemma.model.opened.causal_lm import CausalLM, ModelInfo
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace
from stemma.types import TokenArray

BLOCK_SIZE = 64
NUM_NEW = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like model and what is asked of it."""

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate: int
    vocab: int
    decodes: tuple[tuple[int, int], ...]
    """(sequences, tokens of context each)."""
    prefill: int
    """Tokens of a prompt."""
    cached: int
    """Tokens of a prefix hit."""


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 96, 512, ((1, 100), (3, 60)), 96, 160),
    "0.5b": Shape(
        896, 24, 14, 2, 4864, 151_936, ((1, 1024), (1, 32_768), (32, 1024), (128, 2048)), 8192, 32_768
    ),
    "8b": Shape(
        4096, 32, 32, 8, 14_336, 128_256, ((1, 1024), (1, 32_768), (32, 1024), (64, 2048)), 8192, 32_768
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    limit: float
    goal: str = ""

    @property
    def ratio(self) -> float:
        """What was reached of the limit."""
        return self.value / self.limit


class Timer:
    """Times work on a device, which runs beside the program."""

    def __init__(self, device: torch.device, num_rounds: int) -> None:
        self._device = device
        self._num_rounds = num_rounds

    def sync(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def median_s(self, work: Callable[[], object]) -> float:
        """Return the median time of a call, warmed up three times."""
        for _ in range(3):
            work()
        times = []
        for _ in range(self._num_rounds):
            self.sync()
            start = time.perf_counter()
            work()
            self.sync()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Machine:
    """The limits, as measured here."""

    name: str
    memory_bytes_per_s: float
    flops: float
    upload_bytes_per_s: float


def measure_machine(device: torch.device, timer: Timer) -> Machine:
    """Measure copies in device memory (read plus written bytes), bf16 products, and one large upload."""
    is_cuda = device.type == "cuda"
    num_bytes, side = (2**32, 8192) if is_cuda else (2**26, 256)
    pair = torch.zeros(2, num_bytes, dtype=torch.uint8, device=device)
    copy_s = timer.median_s(lambda: pair[0].copy_(pair[1]))
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    product_s = timer.median_s(lambda: a @ b)
    host = host_rows(1, num_bytes // 4, pin_memory=is_cuda)
    there = torch.empty_like(host, device=device)
    upload_s = timer.median_s(lambda: there.copy_(host, non_blocking=True))
    name = torch.cuda.get_device_name(device) if is_cuda else "cpu (dry run)"
    return Machine(name, 2 * num_bytes / copy_s, 2 * side**3 / product_s, host.nbytes / upload_s)


def random_model(shape: Shape, device: torch.device, max_len: int) -> Any:
    """Return transformers' model of a shape, of random weights."""
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
    )
    auto: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    with device:
        model = auto.from_config(config, dtype=torch.bfloat16)
    return model.to(device).eval().requires_grad_(False)


class Bench:
    """One model of random weights on the device, and its KV."""

    def __init__(self, shape: Shape, device: torch.device, timer: Timer, *, use_graphs: bool) -> None:
        self.shape, self.timer = shape, timer
        max_len = 2 * shape.cached
        self.hf = random_model(shape, device, max_len)
        use_paged_attention(self.hf)
        kv_shape, _ = probe(self.hf)
        parameters = sum(p.numel() for p in self.hf.parameters())
        self.product_parameters = parameters - shape.vocab * shape.hidden
        """Weights that every token is multiplied with: all but the embedding."""
        info = ModelInfo("LlamaForCausalLM", shape.vocab, max_len, (), {}, "0" * 64, 2 * parameters)
        decoder: Any = ModuleDecoder(self.hf, None, None)
        if device.type == "cuda":
            decoder = make_cuda_decoder(self.hf, device, max_context=max_len, use_graphs=use_graphs)
        self.model = CausalLM(decoder, info, kv_shape, device, torch.bfloat16)
        self.layout = self.model.layout(BLOCK_SIZE)
        most = max([n * (tokens + BLOCK_SIZE) for n, tokens in shape.decodes] + [2 * shape.cached])
        self.kv = DeviceKV(self.layout, most // BLOCK_SIZE + 64, device)

    def batch(self, queries: list[int], contexts: list[int]) -> ForwardBatch:
        """Return a step over sequences in random blocks; logits of each one's last row."""
        rng = np.random.default_rng(0)
        needed = [-(-n // BLOCK_SIZE) for n in contexts]
        free = rng.permutation(self.kv.num_blocks).tolist()
        tables = np.zeros((len(contexts), max(needed)), dtype=np.int32)
        positions, slots, starts = [], [], [0]
        for row, (num_queries, context, count) in enumerate(zip(queries, contexts, needed, strict=True)):
            tables[row, :count] = [free.pop() for _ in range(count)]
            at = np.arange(context - num_queries, context)
            positions.append(at)
            slots.append(tables[row, at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE)
            starts.append(starts[-1] + num_queries)
        device = self.model.device
        return ForwardBatch(
            token_ids=torch.from_numpy(rng.integers(3, self.shape.vocab, starts[-1])).to(device),
            positions=torch.from_numpy(np.concatenate(positions)).to(device),
            slots=torch.from_numpy(np.concatenate(slots)).to(device),
            query_starts=starts,
            context_lens=contexts,
            block_tables=torch.from_numpy(tables),
            logits_rows=torch.tensor(starts[1:], device=device) - 1,
        )

    def decode_s(self, num_seqs: int, context: int) -> float:
        """Return the time of a decode step."""
        batch = self.batch([1] * num_seqs, [context] * num_seqs)
        return self.timer.median_s(lambda: self.model.forward(batch, self.kv))

    def rows(self, machine: Machine) -> Iterator[Row]:
        """Measure everything, most telling first."""
        shape = self.shape
        for num_seqs, context in shape.decodes:
            read = 2 * self.product_parameters + num_seqs * context * self.layout.bytes_per_token
            rate = read / self.decode_s(num_seqs, context) / 1e9
            limit = machine.memory_bytes_per_s / 1e9
            yield Row(f"decode, {num_seqs} x {context} tokens", rate, "GB/s", limit, ">= 0.8")
        yield from self._prefill_rows(machine)
        yield from self._hit_rows()
        yield from self._upload_rows(machine)

    def _prefill_rows(self, machine: Machine) -> Iterator[Row]:
        num_tokens, shape = self.shape.prefill, self.shape
        batch = self.batch([num_tokens], [num_tokens])
        # Logits of one row only; causal attention does half of 4 T^2 D operations a head.
        products = 2 * num_tokens * (self.product_parameters - shape.vocab * shape.hidden)
        attention = 2 * num_tokens**2 * shape.hidden * shape.num_layers
        limit = machine.flops / 1e12
        for name, model in (("prefill", self.model), ("prefill, torch's attention", self._plain())):
            seconds = self.timer.median_s(lambda model=model: model.forward(batch, self.kv))  # type: ignore[misc]
            rate = (products + attention) / seconds / 1e12
            yield Row(f"{name}, {num_tokens} tokens", rate, "TFLOP/s", limit, ">= 0.6")

    def _plain(self) -> CausalLM:
        kv_shape, _ = probe(self.hf)
        return CausalLM(
            ModuleDecoder(self.hf, None, None), self.model.info, kv_shape, self.model.device, torch.bfloat16
        )

    def _hit_rows(self) -> Iterator[Row]:
        """Prompts share `cached` tokens; what follows differs, so each computes NUM_NEW tokens."""
        settings = SchedulerSettings()
        space = KeySpace(self.model.fingerprint, self.layout.describe(), BLOCK_SIZE)
        cache = PrefixCache(self.kv, make_index(CacheSettings(), space), space)
        runner = Runner(self.model, self.kv, max_batch_tokens=settings.max_batch_tokens)
        limits = Limits((), self.model.max_model_len)
        engine = Engine(runner, cache, limits, settings, vocab_size=self.shape.vocab)
        rng = np.random.default_rng(1)
        shared = rng.integers(3, self.shape.vocab, self.shape.cached).astype(np.int32)
        times = []
        for number in range(8):
            tail = rng.integers(3, self.shape.vocab, NUM_NEW).astype(np.int32)
            times.append(_first_token_s(engine, f"hit-{number}", np.concatenate((shared, tail))))
        hit = statistics.median(times[2:])
        yield Row(
            f"TTFT, {self.shape.cached} cached + {NUM_NEW} new (limit: cold)", hit * 1e3, "ms", times[0] * 1e3
        )

    def _upload_rows(self, machine: Machine) -> Iterator[Row]:
        is_cuda = self.model.device.type == "cuda"
        count = max(1, min(256, self.kv.num_blocks // 4))
        host = host_rows(count, self.layout.block_bytes, pin_memory=is_cuda)
        copy = DeviceCopy(self.kv)
        ids, sources = list(range(count)), list(host)
        limit = machine.upload_bytes_per_s / 1e9
        seconds = self.timer.median_s(lambda: copy.into(ids, sources))
        yield Row(
            f"upload, blocks of {self.layout.block_bytes} bytes", host.nbytes / seconds / 1e9, "GB/s", limit
        )
        num_seqs, context = self.shape.decodes[-1]
        alone = self.decode_s(num_seqs, context)
        with in_background(lambda: copy.into(ids, sources)) as done:
            start = time.perf_counter()
            beside = self.decode_s(num_seqs, context)
            rate = len(done) * host.nbytes / (time.perf_counter() - start) / 1e9
        yield Row("upload beside decode", rate, "GB/s", limit)
        yield Row("decode beside upload (limit: alone)", 1 / beside, "steps/s", 1 / alone)


def _first_token_s(engine: Engine, request_id: str, tokens: TokenArray) -> float:
    start = time.perf_counter()
    engine.add(engine.checked(GenerationRequest(request_id, tokens, GREEDY, DEFAULT_NAMESPACE)))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


@contextmanager
def in_background(work: Callable[[], None]) -> Iterator[list[None]]:
    """Repeat `work` in a thread; the list grows by one with each time it is done."""
    done: list[None] = []
    is_over = threading.Event()

    def loop() -> None:
        while not is_over.is_set():
            work()
            done.append(None)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield done
    finally:
        is_over.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5b", "8b"])
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    device = torch.device(options.device)
    timer = Timer(device, options.rounds)
    machine = measure_machine(device, timer)
    print(
        f"{machine.name}: memory {machine.memory_bytes_per_s / 1e9:.0f} GB/s, products "
        f"{machine.flops / 1e12:.0f} TFLOP/s, upload {machine.upload_bytes_per_s / 1e9:.1f} GB/s"
    )
    result: dict[str, Any] = {"machine": asdict(machine), "graphs": not options.no_graphs, "shapes": {}}
    for name in options.shapes:
        bench = Bench(SHAPES[name], device, timer, use_graphs=not options.no_graphs)
        rows = result["shapes"][name] = []
        for row in bench.rows(machine):
            rows.append(asdict(row) | {"ratio": row.ratio})
            print(
                f"{name:5} {row.name:48} {row.value:9.1f} {row.unit:8} {row.ratio:6.2f}  {row.goal}",
                flush=True,
            )
        del bench
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
