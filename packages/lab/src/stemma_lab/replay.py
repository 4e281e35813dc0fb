"""Replaying a trace through the very index and policy objects that serve requests.

The index has `block_size=1`: each block of the trace is one "token", its dense id. A request is served in an
instant: look up, use the hits, enter the rest, then evict until the cache fits. So the blocks of the request
itself may be the first to go (a policy may decline to keep them), and nothing is pinned while it runs; what a
live server needs for running requests is not part of `capacity_blocks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.policy import NO_CONCLUSION, BlockTraits, Conclusion
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.prefix.radix import RadixIndex
from stemma.types import BlockIds, Fingerprints
from stemma_lab.clairvoyant import Hits, replay_min
from stemma_lab.class_oracle import replay_class_oracle
from stemma_lab.policies.registry import LAB_POLICIES, make_lab_policy
from stemma_lab.savings import PrefillModel
from stemma_lab.traces.columns import Trace

MIN_POLICY = "min"
"""Name of the clairvoyant bound beside the real policies."""
BOUNDS: Mapping[str, Callable[[Trace, int | None], Hits]] = MappingProxyType(
    {
        MIN_POLICY: replay_min,
        "oracle": partial(replay_class_oracle, crossed=False),
        "oracle-crossed": partial(replay_class_oracle, crossed=True),
    }
)
"""Bounds that know the future in whole or in part, by name: no server can run these."""

Progress = Callable[[int], None]
"""Called with the number of requests served since the last call."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Hits of one policy at one capacity."""

    policy: str
    capacity_blocks: int | None
    """None: no limit."""
    num_hit_blocks: npt.NDArray[np.int32]
    """Leading prompt blocks served from the cache, shape [num_requests]."""
    num_evicted: int
    elapsed_s: float

    def hit_tokens(self, trace: Trace) -> npt.NDArray[np.int64]:
        """Return hit tokens of each request; the last token of a prompt is always computed."""
        blocks = self.num_hit_blocks.astype(np.int64)
        return np.minimum(blocks * trace.block_size, np.maximum(trace.input_tokens - 1, 0))

    def block_hit_ratio(self, trace: Trace) -> float:
        """Return hit blocks over looked-up blocks; a partial last block counts as a block."""
        return float(self.num_hit_blocks.sum()) / max(1, trace.num_looked_up_blocks)

    def token_hit_ratio(self, trace: Trace) -> float:
        """Return hit tokens over prompt tokens."""
        return float(self.hit_tokens(trace).sum()) / max(1, int(trace.input_tokens.sum()))

    def prefill_seconds_saved(self, trace: Trace, model: PrefillModel) -> float:
        """Return the prefill time that the hits avoid."""
        tokens = self.hit_tokens(trace)
        return float(model.seconds(np.zeros_like(tokens), tokens).sum())


class TraceCache:
    """One pool of `capacity_blocks` under a policy, driven by the chains of a trace."""

    def __init__(
        self,
        policy: str,
        capacity_blocks: int | None,
        costs: npt.NDArray[np.float32] | None = None,
        on_evict: Callable[[list[int]], None] | None = None,
    ) -> None:
        """`costs` are seconds to recompute a block by its depth; None: all equal.

        `on_evict` gets the ids of evicted blocks as the trace names them.
        """
        self._index = RadixIndex(1, make_lab_policy(policy))
        self._capacity = capacity_blocks
        self._costs = costs
        self._free: list[int] = []
        self._num_ids = 0
        self._on_evict = on_evict
        self._block_of: dict[int, int] = {}
        """Slot -> block of the trace; kept only where somebody wants to know what was evicted."""
        self.num_evicted = 0

    @property
    def num_blocks(self) -> int:
        """Blocks held now."""
        return self._index.num_blocks

    def num_cached(self, chain: BlockIds) -> int:
        """Return how many leading blocks of `chain` are held. Read-only."""
        return self._index.match(DEFAULT_NAMESPACE, chain).num_tokens

    def serve(
        self, chain: BlockIds, now: float, conclusion: Conclusion = NO_CONCLUSION, session: int = 0
    ) -> int:
        """Look up `chain` (dense ids of the trace), use the hits, enter the rest; return the hit blocks."""
        index = self._index
        match = index.match(DEFAULT_NAMESPACE, chain)
        num_hit = match.num_tokens
        if num_hit:
            index.touch(match.block_ids, now)
        if num_hit < len(chain):
            ids = np.concatenate((match.block_ids, self._take(len(chain) - num_hit)))
            if self._on_evict is not None:
                self._block_of.update(zip(ids[num_hit:].tolist(), chain[num_hit:].tolist(), strict=True))
            index.insert(DEFAULT_NAMESPACE, chain, ids, now, self._traits(chain, session))
            index.conclude(ids, conclusion)
            self._make_room(now)
        else:
            index.conclude(match.block_ids, conclusion)
        return num_hit

    def _traits(self, chain: BlockIds, session: int) -> BlockTraits:
        fingerprints: Fingerprints = chain.astype(np.uint64)
        return BlockTraits(
            fingerprints, None if self._costs is None else self._costs[: len(chain)], session=session
        )

    def _take(self, num_blocks: int) -> BlockIds:
        """Return ids of slots that hold nothing; slots are reused so that ids stay dense."""
        num_reused = min(num_blocks, len(self._free))
        ids = self._free[len(self._free) - num_reused :]
        del self._free[len(self._free) - num_reused :]
        fresh = num_blocks - num_reused
        if fresh:
            ids.extend(range(self._num_ids, self._num_ids + fresh))
            self._num_ids += fresh
        return np.asarray(ids, dtype=np.int32)

    def _make_room(self, now: float) -> None:
        if self._capacity is None:
            return
        excess = self._index.num_blocks - self._capacity
        if excess > 0:
            evicted = self._index.evict(excess, now)
            self.num_evicted += len(evicted)
            self._free.extend(evicted.tolist())
            if self._on_evict is not None:
                self._on_evict([self._block_of.pop(slot) for slot in evicted.tolist()])


def replay(
    trace: Trace,
    policy: str,
    capacity_blocks: int | None,
    costs: npt.NDArray[np.float32] | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Replay the whole trace under one policy (or one of `BOUNDS`).

    Raises ConfigError for an unknown policy.
    """
    started = time.perf_counter()
    if policy in BOUNDS:
        bound = BOUNDS[policy](trace, capacity_blocks)
        if progress is not None:
            progress(trace.num_requests)
        return ReplayResult(policy, capacity_blocks, bound.num_hit_blocks, 0, time.perf_counter() - started)
    cache = TraceCache(policy, capacity_blocks, costs)
    hits = np.zeros(trace.num_requests, dtype=np.int32)
    offsets, ids = trace.offsets.tolist(), trace.block_ids
    reported = 0
    for request, now in enumerate(trace.timestamps_s.tolist()):
        chain = ids[offsets[request] : offsets[request + 1]]
        hits[request] = cache.serve(chain, now, trace.conclusion_of(request), trace.session_of(request))
        if progress is not None and request - reported >= 200:
            progress(request - reported)
            reported = request
    if progress is not None:
        progress(trace.num_requests - reported)
    np.minimum(hits, trace.num_prompt_blocks, out=hits, casting="unsafe")
    return ReplayResult(policy, capacity_blocks, hits, cache.num_evicted, time.perf_counter() - started)


def known_policies() -> list[str]:
    """Return the names that `replay` takes."""
    return [*sorted(LAB_POLICIES), *BOUNDS]
