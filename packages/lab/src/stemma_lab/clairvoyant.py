"""The upper bound of every online policy: Belady's MIN, exact for prefixes.

At each request the blocks with the farthest next use are evicted until the cache fits (L. Belady, IBM Systems
Journal 5(2), 1966). A child's next use is never earlier than its parent's. So evicting the deepest first
among equals never leaves a block without its predecessor: MIN keeps prefixes closed and is optimal for prefix
caches too. A block just computed may be evicted at once, as in every replay here.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma_lab.traces.columns import Trace


@dataclass(frozen=True, slots=True)
class Hits:
    """Leading blocks of each request that were served from the cache, shape [num_requests]."""

    num_hit_blocks: npt.NDArray[np.int32]


def replay_min(trace: Trace, capacity_blocks: int | None) -> Hits:
    """Replay with foresight. `capacity_blocks` None means no limit. O(n log n) for n blocks."""
    if capacity_blocks is None or capacity_blocks >= trace.num_unique_blocks:
        return Hits(_unlimited(trace))
    # One integer orders a block: far next use first, then deep first. The smallest is the victim.
    depth_span = int(trace.depth_of_block.max(initial=0)) + 1
    order = (-(trace.next_request.astype(np.int64) * depth_span + trace.depth_of_block)).tolist()
    ids = trace.block_ids.tolist()
    num_prompt = trace.num_prompt_blocks.tolist()
    offsets = trace.offsets.tolist()
    rank = [0] * trace.num_unique_blocks
    present = bytearray(trace.num_unique_blocks)
    heap: list[tuple[int, int]] = []
    push, pop = heapq.heappush, heapq.heappop
    hits = np.zeros(trace.num_requests, dtype=np.int32)
    num_present = 0
    for request in range(trace.num_requests):
        start, end = offsets[request], offsets[request + 1]
        num_hit, last = 0, start + num_prompt[request]
        for position in range(start, end):
            block = ids[position]
            if present[block]:
                if position < last and position - start == num_hit:
                    num_hit += 1
            else:
                present[block] = 1
                num_present += 1
            rank[block] = key = order[position]
            push(heap, (key, block))
        hits[request] = num_hit
        while num_present > capacity_blocks:
            key, block = pop(heap)
            if present[block] and rank[block] == key:
                present[block] = 0
                num_present -= 1
    return Hits(hits)


def _unlimited(trace: Trace) -> npt.NDArray[np.int32]:
    """Hits of a cache that never evicts: everything seen before, up to the first new block."""
    seen = trace.previous_use >= 0
    in_prompt = trace.depth_of_block < np.repeat(trace.num_prompt_blocks, np.diff(trace.offsets))
    totals = np.concatenate([[0], np.cumsum(seen & in_prompt)])
    return np.asarray(totals[trace.offsets[1:]] - totals[trace.offsets[:-1]], dtype=np.int32)
