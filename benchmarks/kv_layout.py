"""What tiled latents cost: `python -m benchmarks.kv_layout [--rounds N] [--context N] [--json FILE]`.

Steps of a small model with DeepSeek's latents (512 + 64 numbers a token, 16 heads, 8 layers, random weights,
bf16) whose `kv_layout` is nz, beside the same with rows: decodes over a long context and chunks of a prompt,
latents in bf16 and as int8. One thread, its CPU time; layouts take turns after a round to warm up, and the
fastest step of each counts.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from time import thread_time
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.attention import BLOCK_SIZE, Case, make_batch
from benchmarks.checkpoint import latent_checkpoint
from stemma.config.settings import KVArrangement, KVDtype, ModelSettings
from stemma.memory.device.kv import DeviceKV
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM

LAYOUTS: tuple[KVArrangement, ...] = get_args(KVArrangement)
KINDS: tuple[KVDtype, ...] = ("auto", "int8")


@dataclass(frozen=True)
class Figures:
    """Milliseconds of a step."""

    what: str
    kv: str
    rows_ms: float
    nz_ms: float

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
    best = [math.inf] * len(caches)
    for number in range(rounds + 1):
        for index, kv in enumerate(caches):
            start = thread_time()
            model.forward(batch, kv)
            if number:
                best[index] = min(best[index], 1e3 * (thread_time() - start))
    return Figures(case.name, kind, *best)


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(ModelSettings(path=latent_checkpoint(), device="cpu", dtype="bfloat16"))
    figures = [
        step_times(model, case, kind, options.rounds) for kind in KINDS for case in cases_of(options.context)
    ]
    table = Table("step", "KV", "rows, ms", "nz, ms", "nz / rows")
    for one in figures:
        figures_of = (f"{one.rows_ms:.2f}", f"{one.nz_ms:.2f}", f"{one.ratio:.3f}")
        table.add_row(one.what, one.kv, *figures_of)
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in figures], indent=2))


if __name__ == "__main__":
    main()
