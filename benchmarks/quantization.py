"""Quantized weights against our own bf16, and against peers: `python -m benchmarks.quantization`.

Random weights of Qwen2.5-0.5B's shape, loaded in bf16 and with `--quantize int8` and `int4`, in one process.
For each measurement the three take turns, and medians are compared: decode steps at batch 1 and 8, and
prompts of 512 and 2,048 tokens. `--openvino PYTHON` adds OpenVINO GenAI with int8 weights, `--llama PYTHON`
llama.cpp with the same GGUF files (Q8_0 and Q4_0) as ours, `--ik-llama PYTHON` ik_llama.cpp (Q4_K_M, Q4_0 and
Q8_0 of two shapes, made by its own quantizer); each peer runs in its own process, between two rounds of ours,
and `--only peers` leaves out the rest. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import VOCAB_SIZE, half_billion_checkpoint, larger_checkpoint
from benchmarks.peers.gguf import convert
from stemma.engine.api import GenerationRequest
from stemma.engine.build import build_engine
from stemma.engine.core.engine import Engine
from stemma.engine.llm import engine_settings
from stemma.engine.sampling.params import SamplingParams
from stemma.types import TokenArray

WAYS = ("none", "int8", "int4")
KV_CACHE_MEMORY = "200MB"
STEPS_A_TURN = 12
NUM_PREDICTED = 64
PEERS = Path(__file__).parent / "peers"
PEER_COLUMNS = ("llama.cpp", "ik_llama.cpp", "OpenVINO int8")
LLAMA_KINDS = ("Q8_0", "Q4_0")
IK_LLAMA_KINDS = ("Q4_K_M", "Q4_0", "Q8_0")
SUPER_BLOCK = 256
LLAMA_CONTEXT, LLAMA_STEPS, LLAMA_PROMPT = 64, 48, 512


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of each way, by name."""

    name: str
    ms: dict[str, float]
    unit_tokens: int
    """Tokens that this time computes."""


class Bench:
    """An engine for each way to hold the weights."""

    def __init__(
        self, sources: Mapping[str, tuple[Path, str]], threads: int | None, vocab_size: int = VOCAB_SIZE
    ) -> None:
        """Load each way's checkpoint, with its `--quantize`."""
        self._vocab_size = vocab_size
        self.ways = tuple(sources)
        self.engines: dict[str, Engine] = {}
        self.weight_bytes: dict[str, int] = {}
        for way, (path, quantize) in sources.items():
            settings = engine_settings(
                path,
                quantize=quantize,
                kv_cache_memory=KV_CACHE_MEMORY,
                speculation="off",
                num_threads=threads,
            )
            parts = build_engine(settings)
            self.engines[way] = parts.engine
            self.weight_bytes[way] = parts.model.weight_bytes
        self._rng = np.random.default_rng(0)
        self._num_requests = 0

    def tokens(self, num_tokens: int) -> TokenArray:
        """Return random ids never used before."""
        return self._rng.integers(3, self._vocab_size - 64, num_tokens).astype(np.int32)

    def add(self, engine: Engine, tokens: TokenArray, num_tokens: int) -> str:
        """Queue a greedy request of exactly `num_tokens` output tokens."""
        self._num_requests += 1
        name = f"r{self._num_requests}"
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        engine.add(engine.checked(GenerationRequest(name, tokens, params)))
        return name

    def decode(self, batch: int, context: int, turns: int) -> Row:
        """Time decode steps, some of each engine in turn."""
        names = {way: self._start(engine, batch, context, turns) for way, engine in self.engines.items()}
        spent: dict[str, list[float]] = {way: [] for way in self.ways}
        for _ in range(turns):
            for way, engine in self.engines.items():
                spent[way] += [_timed_ms(engine) for _ in range(STEPS_A_TURN)]
        for way, engine in self.engines.items():
            for name in names[way]:
                engine.abort(name)
        medians = {way: statistics.median(times) for way, times in spent.items()}
        return Row(f"decode step, batch {batch}, context {context}", medians, batch)

    def _start(self, engine: Engine, batch: int, context: int, turns: int) -> list[str]:
        names = [
            self.add(engine, self.tokens(context), (turns + 2) * STEPS_A_TURN + 2 * batch)
            for _ in range(batch)
        ]
        started: set[str] = set()
        while len(started) < batch:
            started |= {news.state.request.request_id for news in engine.step()}
        return names

    def prefill(self, num_tokens: int, turns: int) -> Row:
        """Time the first token of fresh prompts, one of each engine in turn."""
        spent: dict[str, list[float]] = {way: [] for way in self.ways}
        for _ in range(turns):
            for way, engine in self.engines.items():
                start = time.perf_counter()
                self.add(engine, self.tokens(num_tokens), 1)
                while not engine.step():
                    pass
                spent[way].append(1e3 * (time.perf_counter() - start))
        medians = {way: statistics.median(times) for way, times in spent.items()}
        return Row(f"first token, {num_tokens} fresh tokens", medians, num_tokens)


def _timed_ms(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step()
    return 1e3 * (time.perf_counter() - start)


def openvino_decode_ms(python: Path, exported: Path, threads: int) -> float:
    """Return OpenVINO's median time per output token at batch 1, in a process of its own."""
    command = [
        str(python),
        str(PEERS / "openvino_decode.py"),
        str(exported),
        str(threads),
        str(NUM_PREDICTED),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["tpot_ms"])


def openvino_export(python: Path, checkpoint: Path) -> Path:
    """Return OpenVINO's int8 export of the checkpoint, made on the first call."""
    target = checkpoint.with_name(checkpoint.name + "-openvino-int8")
    if not (target / "openvino_model.xml").exists():
        tool = str(python.parent / "optimum-cli")
        options = ("--task", "text-generation-with-past", "--weight-format", "int8")
        command = [tool, "export", "openvino", "--model", str(checkpoint), *options, str(target)]
        subprocess.run(command, check=True)
    return target


def llama_files(checkpoint: Path) -> dict[str, Path]:
    """Return the checkpoint as GGUF files by type, made on the first call."""
    files = {kind: checkpoint.with_name(f"{checkpoint.name}-{kind}.gguf") for kind in LLAMA_KINDS}
    for kind, file in files.items():
        if not file.exists():
            convert(checkpoint, file, kind)
    return files


def ik_llama_files(python: Path, checkpoint: Path) -> dict[str, Path]:
    """Return the checkpoint as GGUF files by type, made by ik_llama.cpp's quantizer on the first call."""
    plain = checkpoint.with_name(f"{checkpoint.name}-BF16.gguf")
    if not plain.exists():
        convert(checkpoint, plain, "BF16")
    width = json.loads((checkpoint / "config.json").read_text())["hidden_size"]
    # Where rows aren't whole super-blocks its quantizer writes types of its own, which gguf doesn't know.
    kinds = [kind for kind in IK_LLAMA_KINDS if not kind.endswith("_K_M") or width % SUPER_BLOCK == 0]
    files = {kind: checkpoint.with_name(f"{checkpoint.name}-ik-{kind}.gguf") for kind in kinds}
    for kind, file in files.items():
        if not file.exists():
            tool = str(python.parent / "ik-llama-quantize")
            subprocess.run([tool, "quantize", str(plain), str(file), kind], check=True)
    return files


def llama_rows(
    name: str, command: list[str], files: Mapping[str, Path], threads: int, turns: int, prompt: int
) -> list[Row]:
    """Time a llama.cpp, `command`, and ourselves on the same files: a decode step at batch 1, and a prompt.

    llama.cpp rounds inputs to int8, as `--quantize inputs` does here; `exact` leaves them.
    """
    rows = []
    for kind, file in files.items():
        bench = Bench({"exact": (file, "none"), "inputs": (file, "inputs")}, threads)
        steps = [bench.decode(1, LLAMA_CONTEXT, turns)]
        prompts = [bench.prefill(prompt, 1 + turns // 2)]
        sizes = map(str, (threads, LLAMA_CONTEXT, LLAMA_STEPS, prompt))
        done = subprocess.run([*command, str(file), *sizes], check=True, capture_output=True, text=True)
        peer = json.loads(done.stdout.splitlines()[-1])
        steps.append(bench.decode(1, LLAMA_CONTEXT, turns))
        prompts.append(bench.prefill(prompt, 1 + turns // 2))
        for ours, measured, unit in ((steps, "step_ms", 1), (prompts, "prompt_ms", prompt)):
            means = {way: statistics.mean(row.ms[way] for row in ours) for way in bench.ways}
            rows.append(Row(f"{kind}: {ours[0].name}", means | {name: peer[measured]}, unit))
    return rows


def all_llama_rows(
    llama: Path | None, ik_llama: Path | None, threads: int, turns: int, prompt: int
) -> list[Row]:
    """Time those llama.cpps whose Python is given."""
    rows = []
    if llama is not None:
        command = [str(llama), str(PEERS / "llama_speed.py")]
        rows += llama_rows(
            "llama.cpp", command, llama_files(half_billion_checkpoint()), threads, turns, prompt
        )
    if ik_llama is not None:
        command = [str(ik_llama), str(PEERS / "ik_llama_speed.py")]
        for checkpoint in (half_billion_checkpoint(), larger_checkpoint()):
            files = ik_llama_files(ik_llama, checkpoint)
            for row in llama_rows("ik_llama.cpp", command, files, threads, turns, prompt):
                rows.append(Row(f"{checkpoint.name} {row.name}", row.ms, row.unit_tokens))
    return rows


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="decode, prefill or peers.")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--prompt", type=int, default=LLAMA_PROMPT, help="Tokens of the prompts beside a llama.cpp."
    )
    parser.add_argument(
        "--openvino", type=Path, help="Python with openvino-genai and optimum-intel[openvino]."
    )
    parser.add_argument("--llama", type=Path, help="Python with llama-cpp-python.")
    parser.add_argument("--ik-llama", type=Path, help="Python with ik-llama-cpp-python.")
    args = parser.parse_args()
    path = half_billion_checkpoint()
    threads = args.threads or torch.get_num_threads()
    turns = 3 if args.quick else 7
    exported = None if args.openvino is None else openvino_export(args.openvino, path)
    rows = all_llama_rows(args.llama, args.ik_llama, threads, turns, args.prompt)
    bench = Bench({way: (path, way) for way in args.ways.split(",")}, threads)
    if args.only in "decode":
        rows += [bench.decode(*shape, turns) for shape in ((1, 64), (1, 1024), (8, 64))]
    if args.only in "prefill":
        rows += [bench.prefill(num_tokens, turns) for num_tokens in (512, 2048)]
    if exported is not None:
        before = bench.decode(1, 64, turns)
        peer = openvino_decode_ms(args.openvino, exported, threads)
        again = bench.decode(1, 64, turns)
        ours = {way: (before.ms[way] + again.ms[way]) / 2 for way in again.ms}
        rows.append(Row(again.name, ours | {"OpenVINO int8": peer}, 1))
    print_rows(rows, bench)
    if args.json:
        args.json.write_text(json.dumps([{"name": row.name, **row.ms} for row in rows], indent=1))


def print_rows(rows: list[Row], bench: Bench) -> None:
    """Print milliseconds, tokens a second, and how many times as fast as the peer in the row, or as bf16."""
    columns = list(dict.fromkeys([*bench.ways, *(way for row in rows for way in row.ms)]))
    table = Table(title=", ".join(f"{way} {bench.weight_bytes[way] / 1e6:.0f} MB" for way in bench.ways))
    table.add_column("measurement")
    for way in columns:
        table.add_column(way, justify="right")
    for row in rows:
        base_way = next((peer for peer in PEER_COLUMNS if peer in row.ms), "none")
        base = row.ms.get(base_way)
        cells = []
        for way in columns:
            ms = row.ms.get(way)
            ratio = "" if base is None or ms is None or way == base_way else f" {base / ms:.2f} x"
            cells.append("" if ms is None else f"{ms:.1f} ms {1e3 * row.unit_tokens / ms:.0f} tok/s{ratio}")
        table.add_row(row.name, *cells)
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
