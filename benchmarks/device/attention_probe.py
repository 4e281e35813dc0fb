"""Ask a GPU whether rows of listed attention depend on the batch, and what they cost beside today's kernel.

`python -m benchmarks.device.attention_probe --check --time --json FILE`. `--check`: the steps in which rows
of one sequence have other bits than in one step of all of them. `--time`: microseconds of one layer's
attention in a recording, of the list and of `TritonAttentionStep`, and the limit by what is read. Without a
GPU `--check` runs a small shape in Triton's interpreter (TRITON_INTERPRET=1); there `--time` is refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.device.recorded import record, replay
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout, StoredAs
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.kv_format import KVRows
from stemma.model.cuda.listed_attention import ListedAttentionStep, PieceRoom
from stemma.model.cuda.step_inputs import StepInputs
from stemma.model.cuda.step_tensors import StepTensors
from stemma.model.cuda.triton_attention import TritonAttentionStep

BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    stored: StoredAs = "plain"


SHAPES = {
    "8b": Heads(32, 8, 128),
    "0.5b": Heads(14, 2, 64),
    "gemma2": Heads(16, 8, 256, 4096, 50.0),
}
CODED: dict[str, Heads] = {
    "int8 8b": Heads(32, 8, 128, stored="int8"),
    "fp8 8b": Heads(32, 8, 128, stored="fp8"),
}
"""KV that is codes; only checked."""
SMALL = {"small": Heads(4, 2, 16, 100), "fp8 small": Heads(4, 2, 16, stored="fp8")}
LENGTH, CHUNKS = 5000, (1, 2, 7, 64, 300, 511, 512, 1000, 2048)
"""Tokens of the sequence that is asked for, and numbers of its last ones."""
BESIDE = ((3000, 1), (1, 1), (9000, 40), (700, 700))
"""Context and queries of others."""
TIMED = {
    "decode 1 x 32k": ((32_768, 1),),
    "decode 64 x 2k": ((2048, 1),) * 64,
    "decode 63 x 1k, 1 x 32k": ((32_768, 1), *((1024, 1),) * 63),
    "32 behind 32k": ((32_800, 32),),
    "64 decodes of 2k, 64 rows behind 4k": ((4160, 64), *((2048, 1),) * 64),
    "prompt of 2048": ((2048, 2048),),
    "prompt of 8192": ((8192, 8192),),
}


class Probe:
    """One layer of random KV on a device."""

    def __init__(self, heads: Heads, num_blocks: int, device: torch.device) -> None:
        self.heads, self.device = heads, device
        layout = KVLayout(1, 2, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, "bfloat16", heads.stored)
        self.kv = DeviceKV(layout, num_blocks, device)
        self.generator = torch.Generator(device).manual_seed(0)
        at = torch.arange(num_blocks * BLOCK_SIZE, device=device)
        for part in range(2):
            rows = self.random(len(at), heads.num_kv_heads, heads.head_dim)
            KVRows(self.kv, 0, part, heads.head_dim).write(at // BLOCK_SIZE, at % BLOCK_SIZE, rows)
        scale = heads.head_dim**-0.5
        self.call = AttentionCall(0, scale, heads.window, heads.softcap, None)
        self.room = PieceRoom(1, 64) if device.type == "cpu" else PieceRoom.on(device)

    def random(self, *shape: int) -> torch.Tensor:
        """Return random numbers in bfloat16."""
        return torch.randn(*shape, device=self.device, generator=self.generator).bfloat16()

    def queries(self, num_rows: int) -> torch.Tensor:
        """Return random queries."""
        return self.random(num_rows, self.heads.num_heads, self.heads.head_dim)

    def batch(self, sequences: tuple[tuple[int, int], ...]) -> ForwardBatch:
        """Return a step; the first sequence has always the same blocks, the others any."""
        lens, queries = zip(*sequences, strict=True)
        rng = np.random.default_rng(0)
        tables = rng.integers(0, self.kv.num_blocks, (len(lens), -(-max(lens) // BLOCK_SIZE)), np.int32)
        first = np.random.default_rng(1).permutation(self.kv.num_blocks)
        tables[0] = np.resize(first, tables.shape[1])
        num_rows, device = sum(queries), self.device
        rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        starts = np.cumsum([0, *queries]).tolist()
        return ForwardBatch(rows, rows, rows - 1, starts, list(lens), torch.from_numpy(tables), rows[:1])

    def listed(self, batch: ForwardBatch) -> ListedAttentionStep:
        """Return the step by the list."""
        num_rows = len(batch.token_ids)
        inputs = StepInputs(num_rows, self.device, self.room.num_programs)
        assert inputs.fill(batch, num_rows, self.kv)
        return ListedAttentionStep(inputs, self.kv, self.room)


def check(name: str, heads: Heads, device: torch.device) -> dict[str, object]:
    """Return the steps whose rows have other bits."""
    is_cuda = device.type == "cuda"
    length, chunks = (LENGTH, CHUNKS) if is_cuda else (200, (1, 7, 60))
    others = BESIDE if is_cuda else ((90, 1), (70, 5))
    probe = Probe(heads, 512 if is_cuda else 8, device)
    most = max(chunks)
    known = probe.queries(most)
    whole = probe.listed(probe.batch(((length, most),))).read(probe.call, known)
    found = []
    for count in chunks:
        for way, beside in (("alone", ()), ("beside others", others)):
            batch = probe.batch(((length, count), *beside))
            queries = torch.cat([known[-count:], probe.queries(sum(n for _, n in beside))])
            rows = probe.listed(batch).read(probe.call, queries)[:count]
            if not torch.equal(rows, whole[-count:]):
                share = (rows != whole[-count:]).float().mean().item()
                found.append(f"{count} {way}: {share:.1%} of numbers")
    return {"shape": name, "attention bits differ": found, "error": _error(probe, known, whole, length)}


def _error(probe: Probe, known: torch.Tensor, whole: torch.Tensor, length: int) -> float:
    """Return the relative error of the last row, against float64."""
    heads = probe.heads
    blocks = probe.batch(((length, 1),)).block_tables[0].long().to(probe.device)
    keys, values = (
        KVRows(probe.kv, 0, part, heads.head_dim)
        .gather(blocks)
        .flatten(0, 1)[:length]
        .double()
        .repeat_interleave(heads.num_heads // heads.num_kv_heads, 1)
        for part in (0, 1)
    )
    scores = torch.einsum("hd,khd->hk", known[-1].double(), keys) * probe.call.scaling
    if heads.softcap is not None:
        scores = torch.tanh(scores / heads.softcap) * heads.softcap
    if heads.window is not None:
        scores[:, : length - heads.window] = float("-inf")
    exact = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return float(f"{((whole[-1].double() - exact).norm() / exact.norm()).item():.1e}")


def timed(name: str, heads: Heads, device: torch.device) -> Iterator[dict[str, object]]:
    """Yield microseconds of each step, by the list and by today's kernel."""
    probe = Probe(heads, 4096, device)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    for what, sequences in TIMED.items():
        batch = probe.batch(sequences)
        query = probe.queries(len(batch.token_ids))
        new = probe.random(len(batch.token_ids), heads.num_kv_heads, heads.head_dim)
        listed = probe.listed(batch)
        tensors = StepTensors.of(batch, device)
        today = TritonAttentionStep(tensors, probe.kv, batch=batch, num_multiprocessors=multiprocessors)
        us = {
            way: _us(partial(step.attend, probe.call, query, new, new))
            for way, step in (("listed_us", listed), ("today_us", today))
        }
        keys = sum(min(length, heads.window or length) for length, _ in sequences)
        read = keys * 4 * heads.num_kv_heads * heads.head_dim
        yield {"shape": name, "step": what, **us, "listed_gb_s": round(read / us["listed_us"] / 1e3)}


def _us(attend: Callable[[], object]) -> float:
    recording = record(attend)
    return round(1e6 * min(replay(recording)[0] for _ in range(10)), 1)


def main() -> None:
    """Print a line of JSON for each answer, as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--only", default="", help="shapes whose names begin so")
    parser.add_argument("--json", type=Path, help="write all answers here")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.time and device.type != "cuda":
        parser.error("--time needs a GPU")
    answers: list[dict[str, object]] = []
    for name, heads in (SHAPES | CODED if device.type == "cuda" else SMALL).items():
        if device.type == "cuda" and not name.startswith(given.only):
            continue
        for answer in (
            *([check(name, heads, device)] if given.check else ()),
            *(timed(name, heads, device) if given.time and heads.stored == "plain" else ()),
        ):
            answers.append(answer)
            print(json.dumps(answer), flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps(answers, indent=1))


if __name__ == "__main__":
    main()
