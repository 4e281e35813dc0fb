"""What tiled latents cost: `python -m benchmarks.kv_layout [--rounds N] [--context N] [--json FILE]`.

Steps of a small model with DeepSeek's latents (512 + 64 numbers a token, 16 heads, 8 layers, random weights,
bf16) whose `kv_layout` is nz, beside the same with rows: decodes over a long context and chunks of a prompt,
latents in bf16 and as int8. Layouts take turns, after two rounds to warm up; the ratio is that of their
medians, and `least` that of the fastest steps, which neighbours on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.attention import BLOCK_SIZE, Case, make_batch
from benchmarks.checkpoint import latent_checkpoint
from stemma.config.settings import KVArrangement, KVDtype, ModelSettings
from stemma.memory.device.kv import DeviceKV
from stemma.model.causal_lm import CausalLM
from stemma.model.loading import load_model

LAYOUTS: tuple[KVArrangement, ...] = get_args(KVArrangement)
KINDS: tuple[KVDtype, ...] = ("auto", "int8")
_WARM_UP = 2


@dataclass(frozen=True)
class Figures:
    """Milliseconds of a step."""

    what: str
    kv: str
    rows_ms: float
    nz_ms: float
    least: float
    """Ratio of the fastest steps."""

    @property
    def ratio(self) -> float:
        """Above 1, tiles cost."""
        return self.nz_ms / self.rows_ms


def cases_of(context: int) -> list[Case]:
    """Return the steps that are timed."""
    return [
        Case("decode, batch 1", [context], [1]),
        Case("decode, batch 8", [context // 2] * 8, [1] * 8),
        Case("prompt of 512", [512], [512]),
        Case(f"512 tokens behind {context}", [context + 512], [512]),
    ]


def step_times(model: CausalLM, case: Case, kind: KVDtype, rounds: int) -> Figures:
    """Time one step in both layouts, in turn."""
    batch, num_blocks = make_batch(case)
    caches = [DeviceKV(model.layout(BLOCK_SIZE, kind, layout), num_blocks) for layout in LAYOUTS]
    generator = torch.Generator().manual_seed(0)
    for kv in caches:  # any numbers will do
        raw = kv.data.view(torch.uint8).view(-1)
        raw.copy_(torch.randint(0, 60, (len(raw),), generator=generator, dtype=torch.uint8))
    times: list[list[float]] = [[] for _ in caches]
    for number in range(-_WARM_UP, rounds):
        for kv, taken in zip(caches, times, strict=True):
            start = perf_counter()
            model.forward(batch, kv)
            if number >= 0:
                taken.append(1e3 * (perf_counter() - start))
    rows, nz = times
    return Figures(case.name, kind, median(rows), median(nz), min(nz) / min(rows))


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = load_model(ModelSettings(path=latent_checkpoint(), device="cpu", dtype="bfloat16"))
    figures = [
        step_times(model, case, kind, options.rounds) for kind in KINDS for case in cases_of(options.context)
    ]
    table = Table("step", "KV", "rows, ms", "nz, ms", "nz / rows", "least")
    for one in figures:
        figures_of = (f"{one.rows_ms:.2f}", f"{one.nz_ms:.2f}", f"{one.ratio:.3f}", f"{one.least:.3f}")
        table.add_row(one.what, one.kv, *figures_of)
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in figures], indent=2))


if __name__ == "__main__":
    main()
