"""Models of some gigabytes beside reading them, and beside ik_llama.cpp: `python -m benchmarks.large_models`.

An 8B shape and a mixture of 16B of which a token meets 2.5B, as GGUF files of Q4_K_M's types with random
blocks, the 8B shape as a GPTQ checkpoint of four bits, and half of GPT-OSS 20B's layers in MXFP4. For each:
seconds to load it when its pages aren't in memory, beside reading the file once in the same state, and
beside getting as much memory from the system as its weights take; the process's peak memory beside the file;
milliseconds of decode steps of 1 and 8 rows beside reading what they need of the file at the machine's
bandwidth; a prompt. Each model runs in a process of its own. Run it on a quiet machine with 20 GB.

`--only 8b|gptq|moe|gpt-oss`, `--ik-llama PYTHON` for the peer, which reads no GPTQ: beside that it gets a
file of Q4_0's types. `--quantize inputs` rounds inputs to eight bits, as the peer does. `--folder DIR` keeps
the files (32 GB), `--write` writes them and measures nothing. `--prompt N`, `--rounds N` (processes of ours),
`--turns N` (within each) and `--threads N` shorten it, `--layers N` is for machines without the memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import half_billion_checkpoint
from benchmarks.engine import timed_ms
from benchmarks.peers.random_gguf import EIGHT_BILLION, SIXTEEN_BILLION_MOE, Shape, write_random
from benchmarks.peers.random_gptq import write_random_gptq
from benchmarks.peers.random_mxfp4 import write_random_mxfp4
from benchmarks.quantization import LLAMA_CONTEXT, LLAMA_PROMPT, LLAMA_STEPS, PEERS, Bench
from benchmarks.tiers import drop_pages, read_plainly, timed_s
from stemma.native.library import load_kernels
from stemma.native.process_memory import peak_bytes, resident_bytes

READ_BYTES = 1 << 30
BATCH = 8
SHAPES = {
    "8b": EIGHT_BILLION,
    "moe": SIXTEEN_BILLION_MOE,
    "gptq": EIGHT_BILLION,
    "gpt-oss": Shape("gpt-oss", 12, 2880, 2880, 64, 8, 64, num_experts=32, experts_per_token=4),
}


@dataclass(frozen=True)
class Plan:
    """How each model is measured."""

    threads: int
    prompt: int
    rounds: int
    """Processes of ours that load the model."""
    turns: int
    """Measurements within a process, of which medians are taken; of the peer's prompts, too."""
    quantize: str
    ik_llama: Path | None


@dataclass(frozen=True)
class Case:
    """A model and what a decode step reads of it."""

    name: str
    path: Path
    shape: Shape
    file_bytes: int
    peer_file: Path | None
    """What ik_llama.cpp reads in its place, if it can read any such model."""

    def step_share(self, num_rows: int) -> float:
        """Return the share of the file that a step reads: experts are expected to be chosen evenly."""
        if not self.shape.num_experts:
            return 1.0
        missed = (1 - self.shape.experts_per_token / self.shape.num_experts) ** num_rows
        expert_weights = 3 * self.shape.num_experts * self.shape.hidden * self.shape.intermediate
        attention = (
            2 * self.shape.hidden * self.shape.head_dim * (self.shape.num_heads + self.shape.num_kv_heads)
        )
        return (expert_weights * (1 - missed) + attention) / (expert_weights + attention)


def files_of(path: Path) -> list[Path]:
    """Return what is read of a checkpoint: the file, or the folder's tensors."""
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def read_s(path: Path) -> float:
    """Return the seconds to read the checkpoint once, in order."""
    return sum(timed_s(partial(read_plainly, file)) for file in files_of(path))


def probe(path: Path, plan: Plan) -> dict[str, float]:
    """Load the model in this process, decode with it, and return the figures."""
    libraries = resident_bytes()
    start = time.perf_counter()
    bench = Bench({"own": (path, plan.quantize)}, plan.threads)
    load_s = time.perf_counter() - start
    loading_peak = peak_bytes()
    steps = {rows: bench.decode(rows, LLAMA_CONTEXT, plan.turns).ms["own"] for rows in (1, BATCH)}
    prompt_ms = bench.prefill(plan.prompt, plan.turns).ms["own"]
    return {
        "load_s": load_s,
        "libraries_bytes": libraries,
        "loading_peak_bytes": loading_peak,
        "weight_bytes": bench.weight_bytes["own"],
        "peak_bytes": peak_bytes(),
        "step_ms": steps[1],
        "batch_step_ms": steps[BATCH],
        "prompt_ms": prompt_ms,
    }


def bandwidth(threads: int) -> float:
    """Return bytes a second that all threads read from memory at most."""
    kernels = load_kernels()
    if kernels is None:
        raise SystemExit("no native kernels on this machine: nothing to measure")
    data = torch.ones(READ_BYTES, dtype=torch.uint8)
    times = [timed_ms(lambda: kernels.read_memory(data.data_ptr(), READ_BYTES, threads)) for _ in range(7)]
    return READ_BYTES / min(times) * 1e3


def measure(case: Case, plan: Plan) -> dict[str, Any]:
    """Measure one model, then the peer."""
    read, loaded, memory = [], [], []
    for _ in range(plan.rounds):
        drop_pages(files_of(case.path))
        read.append(read_s(case.path))
        drop_pages(files_of(case.path))
        loaded.append(_own(case.path, plan))
        memory.append(timed_s(partial(_take_memory, int(loaded[-1]["weight_bytes"]))))
    figures = {name: statistics.median(one[name] for one in loaded) for name in loaded[0]}
    figures |= {
        "read_s": min(read),
        "memory_s": statistics.median(memory),
        "bytes_per_s": bandwidth(plan.threads),
    }
    if plan.ik_llama is not None and case.peer_file is not None:
        sizes = map(str, (plan.threads, LLAMA_CONTEXT, LLAMA_STEPS, plan.prompt, plan.turns))
        peer = _last_line([str(plan.ik_llama), str(PEERS / "ik_llama_speed.py"), str(case.peer_file), *sizes])
        figures |= {f"peer_{name}": value for name, value in peer.items()}
    return figures


def _take_memory(num_bytes: int) -> None:
    """Get memory from the system, and write to all of it, as a load has to."""
    torch.empty(num_bytes, dtype=torch.uint8).fill_(1)


def _own(path: Path, plan: Plan) -> dict[str, float]:
    return _last_line(
        [
            *(sys.executable, "-m", "benchmarks.large_models", "--probe", str(path)),
            *("--threads", str(plan.threads), "--prompt", str(plan.prompt)),
            *("--turns", str(plan.turns), "--quantize", plan.quantize),
        ]
    )


def _last_line(command: list[str]) -> dict[str, float]:
    """Return the JSON that a process prints at its end."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(case: Case, figures: dict[str, Any], prompt: int) -> list[tuple[str, str, str]]:
    """Return what was measured, the figure, and its ratio to the limit and to the peer."""
    loaded, read = figures["load_s"], figures["read_s"]
    beyond = figures["loading_peak_bytes"] - figures["libraries_bytes"]
    rows = [
        ("load", f"{loaded:.2f} s", f"{loaded / read:.2f} x reading the file ({read:.2f} s)"),
        ("getting as much memory", f"{figures['memory_s']:.2f} s", "weights' size, in this process"),
        (
            "peak of loading, beyond libraries",
            f"{beyond / 1e9:.2f} GB",
            f"file {case.file_bytes / 1e9:.2f} GB",
        ),
        (
            "peak of all",
            f"{figures['peak_bytes'] / 1e9:.2f} GB",
            f"weights {figures['weight_bytes'] / 1e9:.2f} GB",
        ),
    ]
    for name, rows_, key in (("decode of 1", 1, "step_ms"), (f"decode of {BATCH}", BATCH, "batch_step_ms")):
        limit_ms = 1e3 * case.file_bytes * case.step_share(rows_) / figures["bytes_per_s"]
        note = f"{limit_ms / figures[key]:.2f} of reading at {figures['bytes_per_s'] / 1e9:.1f} GB/s"
        rows.append((name, f"{figures[key]:.1f} ms", note + _beside(figures, key)))
    rows.append(
        (f"prompt of {prompt}", f"{figures['prompt_ms']:.0f} ms", _beside(figures, "prompt_ms").lstrip("; "))
    )
    return rows


def _beside(figures: dict[str, Any], key: str) -> str:
    peer = figures.get(f"peer_{key}")
    return "" if peer is None else f"; ik_llama.cpp {peer:.1f} ms, {peer / figures[key]:.2f} x"


def cases(folder: Path, only: str, layers: int | None, *, with_peer: bool) -> list[Case]:
    """Write the files that aren't there yet and return what to measure."""
    tokenizer = half_billion_checkpoint()
    found = []
    for name, full in SHAPES.items():
        if only not in ("", name):
            continue
        shape = replace(full, num_layers=min(layers or full.num_layers, full.num_layers))
        cut = "" if shape == full else f"-{shape.num_layers}-of-{full.num_layers}-layers"
        peer_file = None
        if name == "gptq":
            path = write_random_gptq(shape, folder / f"bench-8b{cut}-gptq", tokenizer)
            peer_file = folder / f"bench-8b{cut}-Q4_0.gguf"
            if with_peer:
                write_random(shape, peer_file, tokenizer, "Q4_0")
        elif name == "gpt-oss":
            path = write_random_mxfp4(shape, folder / f"bench-gpt-oss-10b{cut}", tokenizer)
        else:
            path = peer_file = write_random(shape, folder / f"bench-{name}{cut}-Q4_K_M.gguf", tokenizer)
        num_bytes = sum(file.stat().st_size for file in files_of(path))
        found.append(Case(name, path, shape, num_bytes, peer_file))
    return found


def parsed() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=SHAPES, default="")
    parser.add_argument("--ik-llama", type=Path, help="Python with ik-llama-cpp-python")
    parser.add_argument("--folder", type=Path, default=half_billion_checkpoint().parent)
    parser.add_argument("--write", action="store_true", help="write the files and end")
    parser.add_argument("--layers", type=int, help="of each model; default: all")
    parser.add_argument("--quantize", choices=("none", "inputs"), default="none")
    parser.add_argument("--prompt", type=int, default=LLAMA_PROMPT)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure and print a table of each model."""
    options = parsed()
    plan = Plan(
        options.threads,
        options.prompt,
        options.rounds,
        options.turns,
        options.quantize,
        options.ik_llama,
    )
    if options.probe:
        print(json.dumps(probe(options.probe, plan)))
        return
    with_peer = plan.ik_llama is not None
    for case in cases(options.folder, options.only, options.layers, with_peer=with_peer):
        if options.write:
            continue
        figures = measure(case, plan)
        title = f"{case.name}: {case.path.name}, --quantize {plan.quantize}"
        if plan.ik_llama is not None and case.peer_file is not None:
            title += f"; ik_llama.cpp: {case.peer_file.name}"
        table = Table("what", "figure", "beside", title=title)
        for row in rows_of(case, figures, plan.prompt):
            table.add_row(*row)
        Console(width=130).print(table)


if __name__ == "__main__":
    main()
