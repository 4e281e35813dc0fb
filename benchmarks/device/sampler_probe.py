"""Ask a GPU whether the sampler of two launches draws torch's tokens, and what it costs beside torch.

`python -m benchmarks.device.sampler_probe [--json FILE]`; `--device cpu --vocab 512` is a dry run in Triton's
interpreter (TRITON_INTERPRET=1), whose figures mean nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.device.take_apart import Report
from benchmarks.gpu import Timer
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.sampler import Sampler, plan_rows
from stemma.engine.sampling.state import SamplingState
from stemma.model.cuda.sampler import choose

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "top_p .95 at .7": SamplingParams(top_p=0.95, temperature=0.7),
    "top_k 50, top_p .9": SamplingParams(top_k=50, top_p=0.9),
    "top_p .99 at 2": SamplingParams(top_p=0.99, temperature=2.0),
    "min_p .05, penalties": SamplingParams(min_p=0.05, repetition_penalty=1.1, presence_penalty=0.5),
}


def main() -> None:
    """Draw by both and compare; then time both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151_936)
    asked = parser.parse_args()
    device, report = torch.device(asked.device), Report(asked.json)
    timer = Timer(device, 20)
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(asked.rows, asked.vocab, generator=generator)).bfloat16().float().to(device)
    for name, params in KINDS.items():
        seeded, prompt = replace(params, seed=1), range(0, asked.vocab, 97)
        states = [SamplingState(seeded, list(prompt), asked.vocab, index=i) for i in range(asked.rows)]
        own, torchs = Sampler(choose), Sampler()
        one, two = (sampler.sample(logits, states).token_ids for sampler in (own, torchs))
        alone = own.sample(logits[-1:], states[-1:]).token_ids
        report.say(f"{name}: tokens that differ", sum(a != b for a, b in zip(one, two, strict=True)))
        report.say(f"{name}: alone as in the batch", alone == one[-1:])
        rows = plan_rows(states)
        for kind, sampler in (("ours", own), ("torch", torchs)):
            report.say(f"{name}: {kind}, ms", 1000 * timer.median_s(partial(sampler.draw, logits, rows)))


if __name__ == "__main__":
    main()
