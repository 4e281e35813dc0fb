"""The engine against plain transformers and the machine's limits: `python -m benchmarks.engine`.

Random weights of Qwen2.5-0.5B's shape in bf16. Everything is a ratio within one run: the two sides take turns
on fresh prompts, and the medians are compared. Options: `--json FILE`, `--quick` (fewer rounds),
`--threads N`, `--only NAME`, `--checkpoint DIR` (another model; `demo`: the demo's). Run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks.checkpoint import VOCAB_SIZE, half_billion_checkpoint
from benchmarks.light_client import stream_completions, whole_completions
from benchmarks.peers import servers
from benchmarks.workloads import decode_rate
from stemma.cli.client import make_http
from stemma.config.sizes import parse_size
from stemma.engine.api import GenerationRequest
from stemma.engine.build import EngineParts, build_engine
from stemma.engine.cache_parts import make_index
from stemma.engine.core.engine import Engine
from stemma.engine.core.runner import Runner
from stemma.engine.llm import engine_settings
from stemma.engine.sampling.params import SamplingParams
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch
from stemma.model.load.demo import demo_model
from stemma.native.process_memory import peak_bytes, resident_bytes
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace
from stemma.types import TokenArray
from stemma_lab.measure.driver import negotiate

CONTEXT = 2048
NUM_NEW = 32
KV_CACHE_MEMORY = "600MB"
MEMORY_PROBE_BUDGET = "256MB"
MEMORY_FLAGS = ("memory-limit", "kv-cache-memory")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    ours_ms: float
    baseline_ms: float
    goal: str
    note: str = ""

    @property
    def ratio(self) -> float:
        """Ours over the baseline; below 1 is faster."""
        return self.ours_ms / self.baseline_ms


class Bench:
    """The model twice, ours and plain, and what both are asked."""

    def __init__(self, path: Path, num_rounds: int) -> None:
        self.num_rounds = num_rounds
        self.path = path
        self.parts: EngineParts = build_engine(engine_settings(path, kv_cache_memory=KV_CACHE_MEMORY))
        self.engine = self.parts.engine
        self.plain: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self.plain.train(False)
        self._rng = np.random.default_rng(0)
        self._num_requests = 0

    def tokens(self, num_tokens: int) -> TokenArray:
        """Return random ids never used before."""
        return self._rng.integers(3, VOCAB_SIZE - 64, num_tokens).astype(np.int32)

    def add(self, engine: Engine, tokens: TokenArray, num_tokens: int) -> str:
        """Queue a greedy request of exactly `num_tokens` output tokens."""
        self._num_requests += 1
        name = f"r{self._num_requests}"
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        engine.add(engine.checked(GenerationRequest(name, tokens, params)))
        return name

    def ttft_ms(self, engine: Engine, tokens: TokenArray) -> float:
        """Serve one prompt for one token; return the milliseconds until that token."""
        start = time.perf_counter()
        self.add(engine, tokens, 1)
        while not engine.step():
            pass
        return 1e3 * (time.perf_counter() - start)

    def second_engine(self, *, enable_prefix_cache: bool) -> Engine:
        """Return an engine with a cache of its own over the same weights."""
        settings = engine_settings(
            self.path, kv_cache_memory=KV_CACHE_MEMORY, enable_prefix_cache=enable_prefix_cache
        )
        model, limits = self.parts.model, self.engine.limits
        layout = model.layout(settings.cache.block_size)
        kv = DeviceKV(layout, self.engine.cache.num_blocks, model.device)
        space = KeySpace(model.fingerprint, layout.describe(), layout.block_size)
        cache = PrefixCache(kv, make_index(settings.cache, space), space)
        runner = Runner(model, kv, max_batch_tokens=settings.scheduler.max_batch_tokens)
        return Engine(runner, cache, limits, settings.scheduler, vocab_size=model.vocab_size)


def timed_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def cold_ttft(bench: Bench) -> Iterator[Row]:
    """A prompt nobody has seen, against one forward of the same tokens."""
    ours, plain = [], []
    for _ in range(bench.num_rounds):
        tokens = bench.tokens(CONTEXT)
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        plain.append(timed_ms(partial(bench.plain, input_ids=ids, use_cache=False, logits_to_keep=1)))
        ours.append(bench.ttft_ms(bench.engine, tokens))
    yield Row(f"cold TTFT, {CONTEXT} tokens / plain forward", median(ours), median(plain), "<= 1.05")


def warm_ttft(bench: Bench) -> Iterator[Row]:
    """A long cached prefix and a short new text, against the bare forward of that text over the same KV."""
    ours, bare, repeat, decode = [], [], [], []
    for _ in range(2 * bench.num_rounds):
        prefix = bench.tokens(CONTEXT)
        bench.ttft_ms(bench.engine, prefix)
        bare.append(_bare_forward_ms(bench, np.concatenate([prefix, bench.tokens(NUM_NEW)])))
        ours.append(bench.ttft_ms(bench.engine, np.concatenate([prefix, bench.tokens(NUM_NEW)])))
        repeat.append(bench.ttft_ms(bench.engine, prefix))
        bench.add(bench.engine, prefix, 5)
        bench.engine.step()
        steps = [timed_ms(bench.engine.step) for _ in range(4)]
        decode.append(median(steps))
        assert not bench.engine.has_work
    name = f"TTFT, {CONTEXT} cached + {NUM_NEW} new / bare forward of {NUM_NEW}"
    yield Row(name, median(ours), median(bare), "<= 1.25")
    yield Row("TTFT, exact repeat / one decode step", median(repeat), median(decode), "<= 1.5")


def _bare_forward_ms(bench: Bench, tokens: TokenArray) -> float:
    """Time the model alone on the tokens of a prompt that aren't cached."""
    cache, model = bench.engine.cache, bench.parts.model
    lease = cache.reserve(DEFAULT_NAMESPACE, tokens)
    assert lease is not None
    first, size = lease.num_cached_tokens, cache.block_size
    positions = np.arange(first, len(tokens))
    slots = lease.block_table[positions // size].astype(np.int64) * size + positions % size
    batch = ForwardBatch(
        token_ids=torch.from_numpy(tokens[first:].astype(np.int64)),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        query_starts=[0, len(positions)],
        context_lens=[len(tokens)],
        block_tables=torch.from_numpy(lease.block_table[None].copy()),
        logits_rows=torch.tensor([len(positions) - 1]),
    )
    kv = bench.engine.runner.kv
    spent = timed_ms(lambda: model.forward(batch, kv))
    cache.free(lease, first)
    return spent


def cache_on_or_off(bench: Bench) -> Iterator[Row]:
    """Prompts that share nothing: what does looking for hits cost?"""
    engines = {on: bench.second_engine(enable_prefix_cache=on) for on in (True, False)}
    spent: dict[bool, list[float]] = {True: [], False: []}
    for round_number in range(bench.num_rounds):
        prompts = [bench.tokens(256) for _ in range(8)]
        for on in (True, False) if round_number % 2 else (False, True):
            spent[on].append(timed_ms(partial(_serve, bench, engines[on], prompts, 16)))
    on_ms, off_ms = median(spent[True]), median(spent[False])
    note = f"throughput on/off {off_ms / on_ms:.3f}"
    yield Row("8 x 256 tokens + 16, nothing shared: cache on / off", on_ms, off_ms, "<= 1.01", note)


def _serve(bench: Bench, engine: Engine, prompts: list[TokenArray], num_tokens: int) -> None:
    for tokens in prompts:
        bench.add(engine, tokens, num_tokens)
    while engine.has_work:
        engine.step()


def decode(bench: Bench) -> Iterator[Row]:
    """Decode steps against transformers' own caches, in turns, and against reading the weights once."""
    read_gb_s = _read_bandwidth_gb_s()
    limit_ms = 1e3 * _bytes_of_step(bench.plain) / (read_gb_s * 1e9)
    for batch in (1, 8):
        for context in (64, 1024):
            ours, dynamic, static = _decode_steps(bench, batch, context)
            best = min((dynamic, "DynamicCache"), (static, "StaticCache"))
            note = (
                f"{1e3 * batch / ours:.1f} tok/s; best is {best[1]}; {ours / limit_ms:.2f} x reading all "
                f"weights in bf16 at {read_gb_s:.1f} GB/s ({limit_ms:.1f} ms)"
            )
            yield Row(
                f"decode step, batch {batch}, context {context} / transformers", ours, best[0], "<= 1.0", note
            )


def _decode_steps(bench: Bench, batch: int, context: int) -> tuple[float, float, float]:
    """Return median milliseconds a step: ours, DynamicCache, StaticCache."""
    steps_a_turn, num_turns = 6, max(2, bench.num_rounds)
    num_tokens = steps_a_turn * num_turns
    prompts = np.stack([bench.tokens(context) for _ in range(batch)])
    # Prompts that are through first go on decoding while the others are computed: let none end early.
    names = [bench.add(bench.engine, tokens, 2 * num_tokens + 2 * batch) for tokens in prompts]
    started: set[str] = set()
    while len(started) < batch:
        started |= {news.state.request.request_id for news in bench.engine.step()}
    ids = torch.from_numpy(prompts.astype(np.int64))
    config = bench.plain.config
    caches: list[Any] = [
        DynamicCache(config=config),
        StaticCache(config=config, max_cache_len=context + num_tokens + 1),
    ]
    last = []
    for cache in caches:
        out = bench.plain(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        last.append(out.logits[:, -1:].argmax(-1))
    spent: list[list[float]] = [[], [], []]
    for _ in range(num_turns):
        spent[0] += [timed_ms(bench.engine.step) for _ in range(steps_a_turn)]
        for i, cache in enumerate(caches):
            for _ in range(steps_a_turn):
                start = time.perf_counter()
                out = bench.plain(input_ids=last[i], past_key_values=cache)
                last[i] = out.logits[:, -1:].argmax(-1)
                spent[i + 1].append(1e3 * (time.perf_counter() - start))
    for name in names:
        bench.engine.abort(name)
    return median(spent[0]), median(spent[1]), median(spent[2])


def served(bench: Bench) -> Iterator[Row]:
    """Decode over HTTP, by a server process of its own, against an engine in this process, in turn.

    Without drafts: a random model repeats itself, and how soon it does differs from prompt to prompt.
    """
    engine = bench.second_engine(enable_prefix_cache=True)
    with tempfile.NamedTemporaryFile(prefix="stemma-", suffix=".log") as log:
        server = servers.stemma(bench.path, torch.get_num_threads(), ("--speculation", "off"))
        with servers.running(server, log) as up:
            for batch in (1, 8):
                here, there = [], []
                for _ in range(2 * bench.num_rounds):
                    here.append(_decode_rate_here(bench, engine, batch))
                    there.append(asyncio.run(_decode_rate_served(bench, up, batch)))
                rates = f"{median(there):.1f} tok/s served, {median(here):.1f} in process"
                # Neighbours are compared: the speed of memory drifts by a third within such a run.
                ratio = median([one / other for one, other in zip(there, here, strict=True)])
                yield Row(
                    f"decode, batch {batch}, context 64, the same over HTTP / in process, a token",
                    1e3 / median(here) / ratio,
                    1e3 / median(here),
                    "<= 1.03",
                    f"{rates}: {ratio:.3f}, goal >= 0.97",
                )
            for batch in (1, 8):
                here, there = [], []
                for _ in range(bench.num_rounds):
                    here.append(_whole_seconds_here(bench, engine, batch))
                    there.append(_whole_seconds_served(bench, up, batch))
                ratio = median([one / other for one, other in zip(there, here, strict=True)])
                own_ms = 1e3 * median(here) / _SERVED_TOKENS
                yield Row(
                    f"whole answers, batch {batch}, prompts of 64, over HTTP / in process, a token",
                    own_ms * ratio,
                    own_ms,
                    "<= 1.03",
                    f"from the request to the answer, not streamed; speed {1 / ratio:.3f}, goal >= 0.97",
                )


_SERVED_TOKENS = 64


def _decode_rate_here(bench: Bench, engine: Engine, batch: int) -> float:
    """Return the tokens a second once every answer has its first."""
    for _ in range(batch):
        bench.add(engine, bench.tokens(64), _SERVED_TOKENS)
    started: set[str] = set()
    num_tokens, first_s = 0, 0.0
    while engine.has_work:
        news = engine.step()
        if first_s:
            num_tokens += sum(len(one.token_ids) for one in news)
        started |= {one.state.request.request_id for one in news}
        if len(started) == batch and not first_s:
            first_s = time.perf_counter()
    return num_tokens / (time.perf_counter() - first_s)


async def _decode_rate_served(bench: Bench, server: servers.Running, batch: int) -> float:
    """Return the same of a server, as a client sees it that takes little of the cores they share."""
    async with make_http(server.base_url) as http:
        target = await negotiate(http, server.model, "completions")
    body = {"model": target.model, "max_tokens": _SERVED_TOKENS, **target.extra}
    bodies = [{**body, "prompt": bench.tokens(64).tolist()} for _ in range(batch)]
    rate = decode_rate(stream_completions(server.base_url, bodies))
    assert rate is not None
    return rate


def _whole_seconds_here(bench: Bench, engine: Engine, batch: int) -> float:
    """Return the seconds from prompts to whole answers."""
    started_s = time.perf_counter()
    for _ in range(batch):
        bench.add(engine, bench.tokens(64), _SERVED_TOKENS)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started_s


def _whole_seconds_served(bench: Bench, server: servers.Running, batch: int) -> float:
    """Return the same of a server whose client waits for whole answers."""
    body = {"model": server.model, "max_tokens": _SERVED_TOKENS, "temperature": 0.0, "ignore_eos": True}
    bodies = [{**body, "prompt": bench.tokens(64).tolist()} for _ in range(batch)]
    answers = whole_completions(server.base_url, bodies)
    assert all(answer.num_generated_tokens == _SERVED_TOKENS for answer in answers)
    return max(answer.finished_at for answer in answers) - min(answer.started_at for answer in answers)


def _bytes_of_step(model: Any) -> int:
    """Return the bytes of weights that a decode step reads: all but embeddings that aren't the head too."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    num_bytes: int = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    unread: int = 0 if head is embedding else embedding.numel() * embedding.element_size()
    return num_bytes - unread


def _read_bandwidth_gb_s() -> float:
    """Return the speed of summing 1 GB, the plainest read there is."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    best = min(timed_ms(data.sum) for _ in range(5))
    return data.numel() * 8 / best / 1e6


def memory_probe(path: Path, *, is_limit: bool) -> None:
    """Serve 1,000 requests in this process and print, as JSON, what memory they took.

    The budget is said as what the process may take beside libraries and weights (`memory_limit`), or as what
    KV alone gets (`kv_cache_memory`).
    """
    libraries = resident_bytes()
    budget = parse_size(MEMORY_PROBE_BUDGET)
    weight_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    limit = libraries + weight_bytes + budget
    sizes: dict[str, int] = {"memory_limit": limit} if is_limit else {"kv_cache_memory": budget}
    parts = build_engine(engine_settings(path, **sizes))
    loaded, loading_peak = resident_bytes(), peak_bytes()
    rng = np.random.default_rng(0)
    for i in range(1000):
        tokens = rng.integers(3, VOCAB_SIZE - 64, int(rng.integers(4, 20))).astype(np.int32)
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        parts.engine.add(parts.engine.checked(GenerationRequest(f"r{i}", tokens, params)))
    while parts.engine.has_work:
        parts.engine.step()
    parts.engine.check()
    kv_bytes = parts.engine.cache.num_blocks * parts.model.layout(parts.engine.cache.block_size).block_bytes
    figures = {
        "libraries_bytes": libraries,
        "loaded_bytes": loaded,
        "loading_peak_bytes": loading_peak,
        "peak_bytes": peak_bytes(),
        "weight_bytes": weight_bytes,
        "budget_bytes": budget,
        "kv_bytes": kv_bytes,
        "num_evicted_blocks": parts.engine.stats().num_evicted_blocks,
    }
    print(json.dumps(figures))


def peak_memory(flag: str, path: Path) -> dict[str, int]:
    """Run the memory probe in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine", "--memory-probe", flag, "--checkpoint", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return figures


def median(values: list[float]) -> float:
    return statistics.median(values)


PARTS = {
    "cold": cold_ttft,
    "warm": warm_ttft,
    "onoff": cache_on_or_off,
    "decode": decode,
    "served": served,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="two rounds instead of seven")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=[*PARTS, "memory"], help="one part of the table")
    parser.add_argument("--checkpoint", type=Path, help="instead of random weights of the 0.5B shape")
    parser.add_argument("--memory-probe", choices=MEMORY_FLAGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = options.checkpoint or half_billion_checkpoint()
    if path == Path("demo"):
        path = demo_model().path
    if options.memory_probe:
        memory_probe(path, is_limit=options.memory_probe == "memory-limit")
        return
    rows: list[Row] = []
    figures: dict[str, Any] = {"threads": options.threads, "torch": torch.__version__}
    if options.only != "memory":
        bench = Bench(path, num_rounds=2 if options.quick else 7)
        bench.ttft_ms(bench.engine, bench.tokens(64))
        with torch.inference_mode():
            for name, part in PARTS.items():
                if options.only in (None, name):
                    for row in part(bench):
                        rows.append(row)
                        _print_row(row)
        figures["rows"] = [asdict(row) | {"ratio": row.ratio} for row in rows]
        del bench
    if options.only in (None, "memory"):
        figures["memory"] = {flag: peak_memory(flag, path) for flag in MEMORY_FLAGS}
        for flag, taken in figures["memory"].items():
            _print_memory(flag, taken)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _print_row(row: Row) -> None:
    print(
        f"{row.name:<66} {row.ours_ms:9.1f} ms {row.baseline_ms:9.1f} ms  ratio {row.ratio:6.3f}  "
        f"goal {row.goal}  {row.note}",
        flush=True,
    )


def _print_memory(flag: str, figures: dict[str, int]) -> None:
    mb = {name: f"{value / 1e6:.0f} MB" for name, value in figures.items()}
    allowed = figures["weight_bytes"] + figures["budget_bytes"]
    taken = figures["peak_bytes"] - figures["libraries_bytes"]
    print(
        f"peak memory of 1,000 requests, --{flag}: {taken / 1e6:.0f} MB over the libraries' "
        f"{mb['libraries_bytes']}; weights {mb['weight_bytes']} + budget {mb['budget_bytes']}, of which KV "
        f"{mb['kv_bytes']}; ratio {taken / allowed:.3f}; {mb['loaded_bytes']} when loaded, at most "
        f"{mb['loading_peak_bytes']} while loading; {figures['num_evicted_blocks']} blocks evicted"
    )


if __name__ == "__main__":
    main()
