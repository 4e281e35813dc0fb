"""How KV and checkpoints trade the memory that they share: tokens reused by rule, layout and size.

``python -m benchmarks.shared_memory [TRACE] [--requests N] [--sizes 600,1500] [--layouts large,small]``

A trace (any that `stemma replay` reads; without one, made-up agents) goes through the real `PrefixCache` and
`CachedStates`, one request after the other on the trace's own clock, without a model. A block of the trace is
a block of `BLOCK` tokens here, or `--merge` of them are; sizes are in such blocks. Rules for whose turn it
is, the first KV block's or the first checkpoint's, as each kind's policy ranks them:

- `served`: what the server does (`checkpoint_goes`);
- `last use`: what was unused the longest.

Learned value and fixed shares were tried once (docs/project/log.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np

from stemma.memory.cache import checkpoints
from stemma.memory.cache.leased_blocks import BlockBuffer
from stemma.memory.cache.places import Places
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.cache.states import CachedStates
from stemma.memory.cache.turns import Turn, checkpoint_goes
from stemma.memory.device.layout import WindowGroup
from stemma.memory.device.slabs import SlabAllocator
from stemma.prefix.eviction.hazard import HazardPolicy
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace
from stemma.prefix.radix import RadixIndex
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.reader import open_trace
from stemma_lab.traces.request import TraceRequest

BLOCK = 64
_STEP = 16 * BLOCK


@dataclass(frozen=True, slots=True)
class Layout:
    """What a checkpoint takes."""

    slab: int
    """Blocks of a slab."""
    states_per_slab: int = 0
    window: WindowGroup | None = None
    """Its pages take a slab each."""


LAYOUTS = {
    "large": Layout(6, 1),  # Qwen3-Next: a state is KV of some 3,000 tokens
    "small": Layout(4, 8),  # half a block
    "windows": Layout(5, 0, WindowGroup((0,), 2 * BLOCK, 1, 16)),  # Gemma 3: five layers slide, one does not
}


class NoBytes(BlockBuffer):
    """A device without memory."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def copy_block_head(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy nothing."""

    def touch(self, block_id: int) -> None:
        """Touch nothing."""


class Rig:
    """A cache of so many blocks on a clock that the trace sets."""

    def __init__(self, layout: Layout, num_blocks: int) -> None:
        self.now = 0.0
        num_blocks = num_blocks // layout.slab * layout.slab
        self.slabs = SlabAllocator(num_blocks, layout.slab)
        blocks_of = _blocks_of(layout)
        pages = int(layout.window is not None)
        places = Places(
            self.slabs, layout.states_per_slab, blocks_of, pages, blocks_of, windows=layout.window
        )
        states = CachedStates(places, BLOCK, None, self.clock, interval=2 * BLOCK, policy=HazardPolicy())
        self.cache = PrefixCache(
            NoBytes(num_blocks),
            RadixIndex(BLOCK, HazardPolicy()),
            KeySpace("model", "layout", BLOCK),
            states=states,
            clock=self.clock,
        )

    def clock(self) -> float:
        """Return the trace's time; it goes on a little, as steps would."""
        self.now += 1e-6
        return self.now

    def serve(self, trace: Trace, request: int) -> int:
        """Serve a request; return how many of its prompt's tokens were cached."""
        self.now = max(self.now, float(trace.timestamps_s[request]))
        ids = trace.blocks_of(request)[: int(trace.num_prompt_blocks[request])]
        tokens = np.append(np.repeat(ids, BLOCK), 0).astype(np.int32)
        lease = self.cache.reserve(DEFAULT_NAMESPACE, tokens, session=trace.session_of(request))
        if lease is None:  # larger than the memory
            return 0
        end = num_cached = lease.num_cached_tokens
        while end < len(tokens):
            start, end = end, min(end + _STEP, len(tokens))
            if not self.cache.plan_state(lease, start, end):
                break
            self.cache.land_state(lease, end, end)
            self.cache.commit(lease, end)
        self.cache.free(lease, 0 if lease.state is None else lease.state.position)
        self.cache.conclude(DEFAULT_NAMESPACE, tokens, trace.conclusion_of(request))
        return num_cached


def _blocks_of(layout: Layout) -> Callable[[int], range]:
    size = layout.slab // max(1, layout.states_per_slab)
    return lambda place: range(place * size, (place + 1) * size)


def by_last_use(own: Turn, kv: Turn, now: float, *, serves: bool, for_blocks: bool) -> bool:
    """Say that what was unused the longest goes, whatever it is."""
    return own < kv


RULES = {"served": checkpoint_goes, "last use": by_last_use}


def reused(trace: Trace, layout: Layout, num_blocks: int, rule: str) -> float:
    """Return tokens reused by tokens asked for."""
    rig = Rig(layout, num_blocks)
    with patch.object(checkpoints, "checkpoint_goes", RULES[rule]):
        cached = sum(rig.serve(trace, request) for request in range(trace.num_requests))
    rig.cache.check()
    return cached / (int(trace.num_prompt_blocks.sum()) * BLOCK)


def made_up(num_requests: int, seed: int = 3) -> Trace:
    """Return agents with a common beginning whose turns grow, some half a minute apart."""
    rng = np.random.default_rng(seed)
    requests: list[TraceRequest] = []
    next_id = 1000
    for session in range(max(1, num_requests // 20)):
        now = float(rng.uniform(0.0, 3.0 * num_requests))
        chain = list(range(int(rng.integers(0, 4)) * 100, 20 + int(rng.integers(0, 4)) * 100))
        for _ in range(int(rng.integers(2, 40))):
            num_new = int(rng.integers(1, 12))
            chain = [*chain, *range(next_id, next_id + num_new)]
            next_id += num_new
            requests.append(
                TraceRequest(now, np.asarray(chain), 512 * len(chain), 50, len(chain), session=session)
            )
            now += float(rng.lognormal(3.0, 1.0))
    return collect("made up", lambda: 512, requests)


def read(path: Path, num_requests: int, merge: int) -> Trace:
    """Return the first requests of a trace of any format that names its blocks, `merge` of them as one."""
    reader = open_trace(path)
    merged = (
        replace(
            one, block_ids=one.block_ids[merge - 1 :: merge], num_prompt_blocks=one.num_prompt_blocks // merge
        )
        for one in islice(reader, num_requests)
        for ids in (one.block_ids,)
    )
    return collect(path.name, lambda: reader.format.block_size * merge, merged)


def measure(args: argparse.Namespace, trace: Trace) -> None:
    """Print the table, a cell as soon as it is known."""
    rules = args.rules.split(";")
    print(f"{trace.name}: {trace.num_requests} requests, {trace.num_looked_up_blocks} blocks asked for")
    print(f"{'layout':<8}{'blocks':>8}  " + "".join(f"{name:>17}" for name in rules))
    for size in map(int, args.sizes.split(",")):
        for name in args.layouts.split(","):
            print(f"{name:<8}{size:>8}  ", end="", flush=True)
            for rule in rules:
                print(f"{reused(trace, LAYOUTS[name], size, rule):>17.4f}", end="", flush=True)
            print()


def main() -> None:
    """Print a line for each layout and size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--merge", type=int, default=1)
    parser.add_argument("--sizes", default="600,1500,4000")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rules", default=";".join(RULES))
    args = parser.parse_args()
    trace = made_up(args.requests) if args.trace is None else read(args.trace, args.requests, args.merge)
    measure(args, trace)


if __name__ == "__main__":
    main()
