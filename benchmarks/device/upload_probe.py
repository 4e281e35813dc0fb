"""Ask a GPU what a load from pinned host memory costs beside one large copy, and what steps lose beside it.

Blocks of the 8B shape (8.4 MB), 30,016 tokens of them, by `DeviceCopy`: until `begin` returns (then a load
has ended), until what is queued behind it has run, ids in order and shuffled; `into`, which waits; one copy
of as many bytes. Then products as a decode step's, alone and beside uploads: goal .95.

`python -m benchmarks.device.upload_probe [--json FILE]`; `--device cpu --blocks 8` is a dry run, whose
figures mean nothing.
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from pathlib import Path

import torch

from benchmarks.device.take_apart import Report
from benchmarks.gpu import Timer, in_background
from benchmarks.tiers import timed_s
from stemma.memory.device.accelerator import accelerator_of
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.device.pinned import host_rows

LAYOUT = KVLayout(32, 2, 64, 8, 128, "bfloat16")
NUM_BLOCKS, NUM_TURNS, NUM_PRODUCTS = 469, 7, 64


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS)
    asked = parser.parse_args()
    device, report, count = torch.device(asked.device), Report(asked.json), asked.blocks
    accelerator = accelerator_of(device)
    with accelerator.scope():
        kv = DeviceKV(LAYOUT, count, device)
        copy = DeviceCopy(kv)
        host = host_rows(count, copy.block_bytes, pin_memory=accelerator.pins_memory).fill_(1)
        sources, shuffled = list(host), random.Random(1).sample(range(count), count)
        whole = kv.block_run(0, count)
        timer = Timer(device, NUM_TURNS)
        limit_s = timer.median_s(lambda: whole.copy_(host.view(-1), non_blocking=True))
        report.say("one copy, GB/s", host.nbytes / limit_s / 1e9)

        def load(ids: list[int]) -> float:
            """Return seconds until a load has ended; a step is behind it, whose end the caller waits for."""
            waits = []
            ended_s = timed_s(lambda: waits.append(copy.begin(ids, sources)))
            kv.uploads.order()
            kv.block_bytes_view(ids[-1]).view(torch.int16).sum()
            accelerator.synchronize()
            for wait_for in filter(None, waits):
                wait_for()
            return ended_s

        for name, ids in (("in order", list(range(count))), ("shuffled", shuffled)):
            ended_s = sorted(load(ids) for _ in range(NUM_TURNS))[NUM_TURNS // 2]
            report.say(f"{name}: a load ends, of one copy", ended_s / limit_s)
            behind_s, waits_s = (
                timer.median_s(partial(load, ids)),
                timer.median_s(partial(copy.into, ids, sources)),
            )
            report.say(f"{name}: a step behind it ends", behind_s / limit_s)
            report.say(f"{name}: a load that waits", waits_s / limit_s)
        report.say("what the step read", int(kv.block_bytes_view(shuffled[-1]).amin()) == 1)
        _beside(report, timer, device, copy, sources)


def _beside(
    report: Report, timer: Timer, device: torch.device, copy: DeviceCopy, sources: list[torch.Tensor]
) -> None:
    """Time products of one row, which read weights, alone and while uploads run."""
    weight = torch.zeros(4096, 14336, dtype=torch.bfloat16, device=device)
    row = torch.zeros(1, 14336, dtype=torch.bfloat16, device=device)

    def step() -> None:
        for _ in range(NUM_PRODUCTS):
            torch.nn.functional.linear(row, weight)

    alone_s = timer.median_s(step)
    ids = list(range(len(sources)))
    with in_background(lambda: copy.into(ids, sources)) as done:
        beside_s = timer.median_s(step)
    report.say("steps beside uploads, of alone", alone_s / beside_s)
    report.say("uploads meanwhile", len(done))


if __name__ == "__main__":
    main()
