"""Decode on a GPU beside transformers, a process for each: `python -m benchmarks.device.peers --who WHO`.

`compiled`: `generate` with a static cache, which transformers compiles, one sequence behind 1,024 tokens.
`continuous`: `generate_batch`, 64 sequences of 1,024. `modules`, `listed`, `fused`: ours by that path, both.
All have the same shape (`--shape 8b`) and random weights in bf16. Milliseconds a step: of `compiled` a call
for 64 tokens less one for a single token, over 63. `--device cpu --shape tiny` is a dry run, whose figures
mean nothing. mini-sglang isn't among them: no registry here has its wheels.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.device.take_apart import Report, recorded_decoder
from benchmarks.gpu import SHAPES, Bench, Timer, random_model

OURS = ("modules", "listed", "fused")
NUM_TOKENS, NUM_ROUNDS = 64, 5
_CONFIG: Any = GenerationConfig


def step_ms(timer: Timer, generate: Callable[[int], object]) -> float:
    """Return milliseconds of a decode step, from calls for one token and for many."""
    one, many = (timer.median_s(lambda count=count: generate(count)) for count in (1, NUM_TOKENS))  # type: ignore[misc]
    return 1000 * (many - one) / (NUM_TOKENS - 1)


def compiled(model: Any, ids: torch.Tensor) -> Callable[[int], object]:
    """Return what generates so many tokens behind ids [1, T] with a static cache."""

    def generate(count: int) -> object:
        return model.generate(
            ids,
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            cache_implementation="static",
            pad_token_id=0,
        )

    return generate


def continuous_ms(model: Any, ids: torch.Tensor) -> float:
    """Return milliseconds of a step of continuous batching behind each of ids [n, T], by tokens' times.

    A call makes its own cache first, which takes seconds; its second half is looked at.
    """
    config = _CONFIG(do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(ids.tolist(), generation_config=config, record_timestamps=True)
    times = [one.timestamps[NUM_TOKENS // 2 :] for one in found.values()]
    return float(
        1000 * statistics.median(after - before for each in times for before, after in pairwise(each))
    )


def main() -> None:
    """Measure one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--who", required=True, choices=("compiled", "continuous", *OURS))
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    device, shape, report = torch.device(asked.device), SHAPES[asked.shape], Report(asked.json)
    timer, is_dry = Timer(device, NUM_ROUNDS), asked.shape == "tiny"
    num_seqs, context = (3, 60) if is_dry else (64, 1024)
    if asked.who in OURS:
        bench = Bench(shape, device, timer, use_graphs=True)
        if asked.who != "modules":
            decoder = bench.model.decoder = recorded_decoder(bench, asked.who)
            if not is_dry:
                decoder.warm_up(bench.kv, lambda _share: None)
        for count in (1, num_seqs):
            report.say(f"{asked.who}: {count} x {context}, ms a step", 1000 * bench.decode_s(count, context))
        return
    model = random_model(shape, device, 2 * shape.cached)
    count = 1 if asked.who == "compiled" else num_seqs
    ids = torch.randint(3, shape.vocab, (count, context), device=device)
    ms = step_ms(timer, compiled(model, ids)) if asked.who == "compiled" else continuous_ms(model, ids)
    report.say(f"{asked.who}: {count} x {context}, ms a step", ms)


if __name__ == "__main__":
    main()
