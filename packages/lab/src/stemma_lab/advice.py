"""Advice for a traffic, in words and figures, from a recorded trace, by replaying it.

Each piece of advice says what it would change in the share of prompt tokens served from cache, and in the
time spent computing prompts. The figures come from `plan.predict`, which replays the trace through the
serving index and policies; following an advice can be checked by replaying, or serving, the traffic again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from stemma.config.sizes import format_size
from stemma_lab.plan import GIGABYTE, Prediction, TierBytes, Workload, predict
from stemma_lab.replay import replay
from stemma_lab.statistics import stack_distances

Topic = Literal["worth", "memory", "tier", "policy", "prompts"]

WORTH = 0.02
"""Share of prefill time below which a cache isn't worth its memory."""
NEARLY_ALL = 0.95
"""Share of the possible hits that counts as enough."""
MIN_GAIN = 0.002
"""Gains of the token hit ratio below this aren't advised."""
POLICIES = ("lru", "hazard")


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice."""

    topic: Topic
    text: str
    setting: str | None
    """The setting to change; None: nothing has to be changed, or no setting does it."""
    hits_before: float
    """Share of prompt tokens from cache, as things are."""
    hits_after: float | None
    """The same once it is followed; None: not predicted."""
    prefill_s_saved: float | None = None
    """Over the whole trace; negative: what it costs."""


@dataclass(frozen=True, slots=True)
class UnlimitedResults:
    """Results of an unlimited cache."""

    hits: float
    """Share of prompt tokens."""
    prefill_s: float
    uncached_s: float
    """Time to compute all prompts without any cache."""


def advise(workload: Workload, tiers: Sequence[TierBytes]) -> list[Advice]:
    """Return advice for these tiers, the device first. Raises ConfigError if the device holds no block."""
    base, limits = predict(workload, tiers), limits_of(workload)
    worth = _worth(workload, base, limits)
    if worth.setting is not None:
        return [worth]
    memory = _memory(workload, tiers, base, limits)
    found = [worth, memory]
    if memory.setting is not None:
        found += _tiers(workload, tiers, base)
    return [*found, _policy(workload, tiers, base), *_prompts(workload, base)]


def limits_of(workload: Workload) -> UnlimitedResults:
    """Return what the trace allows: hits of a cache that never evicts."""
    trace = workload.trace
    tokens = replay(trace, "lru", None).hit_tokens(trace)
    total = max(1, int(trace.input_tokens.sum()))
    computed = workload.prefill.seconds(tokens, trace.input_tokens)
    everything = workload.prefill.seconds(np.zeros_like(tokens), trace.input_tokens)
    return UnlimitedResults(float(tokens.sum()) / total, float(computed.sum()), float(everything.sum()))


def _worth(workload: Workload, base: Prediction, limits: UnlimitedResults) -> Advice:
    possible = 1.0 - limits.prefill_s / max(1e-9, limits.uncached_s)
    saved_s = limits.uncached_s - base.prefill_s
    if possible < WORTH:
        text = (
            f"The cache isn't worth its memory here: even an unlimited one would save {possible:.1%} of the "
            f"time to compute prompts ({limits.hits:.1%} of their tokens repeat). Switch it off, or look at "
            f"why prompts share so little."
        )
        return Advice("worth", text, "enable_prefix_cache = false", base.token_hit_ratio, 0.0, -saved_s)
    text = (
        f"The cache is worth it: {base.token_hit_ratio:.1%} of prompt tokens come from it, which saves "
        f"{saved_s / max(1e-9, limits.uncached_s):.1%} of the time to compute prompts "
        f"({saved_s:,.0f} of {limits.uncached_s:,.0f} s). An unlimited cache would serve {limits.hits:.1%}."
    )
    return Advice("worth", text, None, base.token_hit_ratio, base.token_hit_ratio)


def _memory(
    workload: Workload, tiers: Sequence[TierBytes], base: Prediction, limits: UnlimitedResults
) -> Advice:
    held = sum(tier.capacity_bytes for tier in tiers)
    if base.token_hit_ratio >= NEARLY_ALL * limits.hits:
        text = (
            f"Memory is enough: {format_size(held)} serve {base.token_hit_ratio:.1%} of prompt tokens, and "
            f"no size would serve more than {limits.hits:.1%}."
        )
        return Advice("memory", text, None, base.token_hit_ratio, base.token_hit_ratio)
    needed = _enough_bytes(workload)
    last = tiers[-1]
    for tier in tiers:
        if tier.capacity_bytes:
            last = tier
    grown = _grown(tiers, last, max(0, needed - held))
    after = predict(workload, grown)
    text = (
        f"More memory would help: {format_size(held)} serve {base.token_hit_ratio:.1%} of prompt tokens, "
        f"{format_size(held + max(0, needed - held))} would serve {after.token_hit_ratio:.1%}."
    )
    setting = f"{last.name}: {format_size(last.capacity_bytes + max(0, needed - held))}"
    saved_s = base.prefill_s - after.prefill_s
    return Advice("memory", text, setting, base.token_hit_ratio, after.token_hit_ratio, saved_s)


def _enough_bytes(workload: Workload) -> int:
    """Return the memory with which LRU has nearly all the hits there can be (by stack distances)."""
    distances = stack_distances(workload.trace)
    reused = np.sort(distances[distances >= 0])
    needed_blocks = int(reused[min(len(reused) - 1, int(NEARLY_ALL * len(reused)))]) + 1
    return needed_blocks * workload.block_bytes


def _tiers(workload: Workload, tiers: Sequence[TierBytes], base: Prediction) -> list[Advice]:
    """Return where more memory helps most: each tier grown by a quarter of the device's size."""
    added = max(GIGABYTE, tiers[0].capacity_bytes // 4)
    best: tuple[float, TierBytes, Prediction] | None = None
    for tier in tiers:
        after = predict(workload, _grown(tiers, tier, added))
        gain_s = (base.ttft_mean_s - after.ttft_mean_s) / (added / GIGABYTE)
        if best is None or gain_s > best[0]:
            best = (gain_s, tier, after)
    assert best is not None
    gain_s, tier, after = best
    hits = after.token_hit_ratio - base.token_hit_ratio
    text = (
        f"The next gigabyte helps most in the {tier.name} tier: {format_size(added)} more there raise the "
        f"hits from {base.token_hit_ratio:.1%} to {after.token_hit_ratio:.1%} of prompt tokens "
        f"({100 * hits / (added / GIGABYTE):.2f} points and {1000 * gain_s:.2f} ms of the first token for "
        "each gigabyte)."
    )
    setting = f"{tier.name}: {format_size(tier.capacity_bytes + added)}"
    saved_s = base.prefill_s - after.prefill_s
    return [Advice("tier", text, setting, base.token_hit_ratio, after.token_hit_ratio, saved_s)]


def _policy(workload: Workload, tiers: Sequence[TierBytes], base: Prediction) -> Advice:
    others = {
        name: predict(replace(workload, policy=name), tiers) for name in POLICIES if name != workload.policy
    }
    name, after = max(others.items(), key=lambda item: item[1].token_hit_ratio)
    if after.token_hit_ratio < base.token_hit_ratio + MIN_GAIN:
        tried = ", ".join(f"{other} {one.token_hit_ratio:.1%}" for other, one in others.items())
        fits = f"{workload.policy} serves {base.token_hit_ratio:.1%} of prompt tokens"
        text = f"The policy fits: {fits} ({tried})."
        return Advice("policy", text, None, base.token_hit_ratio, base.token_hit_ratio)
    text = (
        f"Another policy fits better: {name} serves {after.token_hit_ratio:.1%} of prompt tokens, "
        f"{workload.policy} {base.token_hit_ratio:.1%}."
    )
    saved_s = base.prefill_s - after.prefill_s
    setting = f'eviction = "{name}"'
    return Advice("policy", text, setting, base.token_hit_ratio, after.token_hit_ratio, saved_s)


def _prompts(workload: Workload, base: Prediction) -> list[Advice]:
    """Return how many prompt tokens lie in prompts that differ from all before in their first block."""
    trace = workload.trace
    hits = replay(trace, "lru", None).num_hit_blocks
    total = max(1, int(trace.input_tokens.sum()))
    share = float(trace.input_tokens[hits == 0].sum()) / total
    if share < 0.05:
        return []
    text = (
        f"{share:.1%} of prompt tokens lie in prompts whose first {trace.block_size} tokens nobody had sent "
        "before: no cache can serve them. If these prompts begin with a date, an id or a name, put it at the "
        "end; `stemma explain --divergences` shows on a running server what they part at."
    )
    return [Advice("prompts", text, None, base.token_hit_ratio, None)]


def _grown(tiers: Sequence[TierBytes], chosen: TierBytes, added_bytes: int) -> list[TierBytes]:
    return [
        replace(tier, capacity_bytes=tier.capacity_bytes + added_bytes) if tier is chosen else tier
        for tier in tiers
    ]
