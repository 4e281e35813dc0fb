"""How KV and checkpoints trade the memory that they share: tokens reused by rule, layout and size.

``python -m benchmarks.shared_memory [TRACE] [--requests N] [--sizes 600,1500] [--layouts large,small]``

A trace (any that `stemma replay` reads; without one, made-up agents) goes through the real `PrefixCache` and
`CachedStates`, one request after the other on the trace's own clock, without a model. A block of the trace is
a block of `BLOCK` tokens here, or `--merge` of them are; sizes are in such blocks. Rules for whose turn it
is, the first KV block's or the first checkpoint's, as each kind's policy ranks them:

- `served`: what the server does (`Checkpoints._goes_before`);
- `last use`: what was unused the longest;
- `value`: the lower of rate x tokens / blocks, where both policies rank by learned rates;
- `value, whole`: the same, where KV counts with the checkpoint behind it that leaves with it, or nothing;
- `value, own kind`: the same, where the other kind goes if it is worth half as much;
- `share P`: a fixed share of the memory for checkpoints, the best of some: what a hand could find.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from stemma.memory.cache.checkpoints import Checkpoint, Checkpoints
from stemma.memory.cache.leased_blocks import BlockBuffer
from stemma.memory.cache.places import Places
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.cache.states import CachedStates
from stemma.memory.cache.turns import Turn, turn_of
from stemma.memory.device.layout import WindowGroup
from stemma.memory.device.slabs import SlabAllocator
from stemma.prefix.eviction.hazard import HazardPolicy
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace
from stemma.prefix.radix import RadixIndex
from stemma.types import BlockKey
from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.reader import open_trace
from stemma_lab.traces.request import TraceRequest

BLOCK = 64
_STEP = 16 * BLOCK
SHARES = (0.1, 0.25, 0.5, 0.75)
GoesBefore = Callable[..., bool]
"""As `Checkpoints._goes_before`."""


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
        self.policies = HazardPolicy(), HazardPolicy()
        states = CachedStates(places, BLOCK, None, self.clock, interval=2 * BLOCK, policy=self.policies[1])
        self.kept: Checkpoints = states._kept  # noqa: SLF001 - rules that the server doesn't have
        self.cache = PrefixCache(
            NoBytes(num_blocks),
            RadixIndex(BLOCK, self.policies[0]),
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


def by_last_use(rig: Rig) -> GoesBefore:
    """Return the rule that what was unused the longest goes, whatever it is."""
    return lambda one, _key, kv, **_for: turn_of(one.hint, one.used_at, rig.now) < kv


def by_value(rig: Rig, own: GoesBefore, rule: str) -> GoesBefore:
    """Return the rule that compares what keeping saves a second and block; before it is learned, `own`."""
    kv_policy, policy = rig.policies
    across = 2.0 if rule == "value, own kind" else 1.0

    def goes_before(one: Checkpoint, key: BlockKey, kv: Turn, *, for_blocks: bool) -> bool:
        if not (kv_policy._learned and policy._learned):  # noqa: SLF001
            return own(one, key, kv, for_blocks=for_blocks)
        worth, behind = _worth(policy, one.number) / BLOCK / _cost(rig, one), rig.kept.get(key)
        if rule == "value":
            return worth < _worth(kv_policy, _first_block(rig))
        if behind is None:
            return False
        other = _worth(policy, behind.number) / BLOCK / (1.0 + _cost(rig, behind))
        return worth * across < other if for_blocks else worth < across * other

    return goes_before


def _first_block(rig: Rig) -> int:
    assert rig.cache.index is not None
    block = rig.cache.index.next_victim(rig.now)
    assert block is not None
    return block


def _worth(policy: HazardPolicy, number: int) -> float:
    queue = policy._records.queues.item(policy._record_of.item(number))  # noqa: SLF001
    return policy._rank(policy._live.get(number, number), queue)  # noqa: SLF001


def _cost(rig: Rig, one: Checkpoint) -> float:
    """Return the blocks that would be free without a checkpoint; pages that others hold as well stay."""
    places = rig.kept.places
    own = sum(rig.kept.pages.holders(page) == 1 for page in one.pages)
    state = 0.0 if one.state is None else places.slabs.slab / max(1, places.states_per_slab)
    return max(0.25, state + own * places.slabs.slab)


def by_share(rig: Rig, share: float) -> GoesBefore:
    """Return the rule that a share of the memory is the checkpoints'."""
    most = share * rig.slabs.num_slabs
    kept = rig.kept
    return lambda *_one, **_for: kept.states._num_taken + kept.pages._num_taken > most  # noqa: SLF001


def reused(trace: Trace, layout: Layout, num_blocks: int, rule: str) -> float:
    """Return tokens reused by tokens asked for."""
    rig = Rig(layout, num_blocks)
    own = rule_of = rig.kept._goes_before  # noqa: SLF001 - see Rig
    if rule == "last use":
        rule_of = by_last_use(rig)
    elif rule.startswith("value"):
        rule_of = by_value(rig, own, rule)
    elif rule.startswith("share"):
        rule_of = by_share(rig, float(rule.split()[1]))
    setattr(rig.kept, "_goes_before", rule_of)  # noqa: B010 - see Rig
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
                print(f"{cell(trace, LAYOUTS[name], size, rule):>17}", end="", flush=True)
            print()


def cell(trace: Trace, layout: Layout, num_blocks: int, rule: str) -> str:
    """Return what a rule reuses; of shares, what the best of them does."""
    if rule != "share":
        return f"{reused(trace, layout, num_blocks, rule):.4f}"
    found = {share: reused(trace, layout, num_blocks, f"share {share}") for share in SHARES}
    best = max(found, key=lambda share: found[share])
    return f"{found[best]:.4f} ({best})"


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
    parser.add_argument("--rules", default="served;last use;value;value, whole;value, own kind;share")
    args = parser.parse_args()
    trace = made_up(args.requests) if args.trace is None else read(args.trace, args.requests, args.merge)
    measure(args, trace)


if __name__ == "__main__":
    main()
