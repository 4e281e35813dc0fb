"""Replaying a recording as its server served it: running requests hold their blocks.

`replay` serves a request in an instant. Here it holds blocks from its start to its end, both recorded. It
shares and pins what it finds, takes room for the rest of its prompt, then for its answer as that grows, and
what isn't pinned is evicted for it. Blocks are the server's: several of the trace.

The server that was recorded found room for every request at the recorded times. Where the simulated one
finds none, it holds too much for a while instead of letting the request wait.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.policy import BlockTraits, Conclusion
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.prefix.radix import RadixIndex
from stemma.types import BlockIds, Fingerprints, TokenArray
from stemma_lab.policies.registry import make_lab_policy
from stemma_lab.traces.columns import Trace
from stemma_lab.traces.request import Measured

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)


class Running:
    """What a running request holds. Only `ServedCache` changes it."""

    def __init__(self, chain: TokenArray, session: int = 0) -> None:
        """`chain`: blocks of the trace, of the prompt and then of what is generated."""
        self.chain = chain
        self.session = session
        self.pinned = _NO_BLOCKS
        """Its blocks that are cached, from the root."""
        self.num_blocks = 0
        """All of its blocks."""

    @property
    def num_reserved(self) -> int:
        """Its blocks that aren't cached yet."""
        return self.num_blocks - len(self.pinned)


class ServedCache:
    """The device cache of a server, driven by starts, growth and ends of requests."""

    def __init__(self, measured: Measured) -> None:
        """Begin empty, with the policy, size and blocks of the server that was recorded."""
        self._size = measured.server_block
        self._capacity = measured.capacity_blocks // self._size
        self._index = RadixIndex(self._size, make_lab_policy(measured.eviction))
        self._present: set[int] = set()
        self._free: list[int] = []
        self._num_ids = 0
        self._num_reserved = 0

    def start(self, running: Running, num_prompt: int, now: float) -> int:
        """Begin a request whose prompt has the first `num_prompt` blocks; return how many are hits."""
        index = self._index
        prompt = running.chain[:num_prompt]
        match = index.match(DEFAULT_NAMESPACE, prompt)
        num_shared = match.num_full_blocks(self._size)
        running.pinned = match.block_ids[:num_shared]
        running.num_blocks = num_shared
        index.pin(running.pinned)
        self._reserve(running, -(-num_prompt // self._size), now)
        index.touch(running.pinned, now)
        if match.num_tokens % self._size and match.block_ids.item(-1) in self._present:
            index.touch(match.block_ids[-1:], now)  # its head is copied
        self._commit(running, num_prompt // self._size, now)
        return match.num_tokens

    def grow(self, running: Running, num_blocks: int, now: float) -> None:
        """Give a request so many blocks of the server; those before the last are full."""
        self._reserve(running, num_blocks, now)
        self._commit(running, num_blocks - 1, now)

    def end(self, running: Running, now: float, conclusion: Conclusion) -> None:
        """End a request: what it computed stays cached until it is evicted."""
        self._num_reserved -= running.num_reserved
        if len(running.chain):
            self._index.conclude(self._enter(running, running.chain, now), conclusion)
        self._index.unpin(running.pinned)
        self._make_room(0, now)

    def _reserve(self, running: Running, num_blocks: int, now: float) -> None:
        num_more = num_blocks - running.num_blocks
        self._make_room(num_more, now)
        running.num_blocks += num_more
        self._num_reserved += num_more

    def _commit(self, running: Running, num_full: int, now: float) -> None:
        """Enter a request's leading full blocks."""
        num_pinned = len(running.pinned)
        if num_full <= num_pinned:
            return
        entered = self._enter(running, running.chain[: num_full * self._size], now)
        self._index.pin(entered[num_pinned:])
        running.pinned = entered
        self._num_reserved -= num_full - num_pinned

    def _enter(self, running: Running, chain: TokenArray, now: float) -> BlockIds:
        """Enter the leading blocks of a request's chain; return those that hold it."""
        known = running.pinned
        num_blocks = -(-len(chain) // self._size)
        fresh = self._take(num_blocks - len(known))
        ends = np.minimum((np.arange(num_blocks) + 1) * self._size, len(chain)) - 1
        prints: Fingerprints = chain[ends].astype(np.uint64) + np.uint64(1)
        ids = np.concatenate((known, fresh)).astype(np.int32)
        inserted = self._index.insert(
            DEFAULT_NAMESPACE, chain, ids, now, BlockTraits(prints, session=running.session)
        )
        added, dropped = inserted.added.tolist(), inserted.dropped.tolist()
        self._present.update(added)
        self._present.difference_update(dropped)
        self._free += [*set(fresh.tolist()).difference(added), *dropped]
        return inserted.canonical

    def _take(self, num_blocks: int) -> BlockIds:
        """Return ids that stand for nothing now; they are used again, so that they stay dense."""
        num_reused = min(num_blocks, len(self._free))
        ids = [self._free.pop() for _ in range(num_reused)]
        ids += range(self._num_ids, self._num_ids + num_blocks - num_reused)
        self._num_ids += num_blocks - num_reused
        return np.asarray(ids, dtype=np.int32)

    def _make_room(self, num_blocks: int, now: float) -> None:
        excess = self._index.num_blocks + self._num_reserved + num_blocks - self._capacity
        if excess > 0:
            evicted = self._index.evict(excess, now).tolist()
            self._present.difference_update(evicted)
            self._free += evicted


def served_tokens(trace: Trace, measured: Measured) -> npt.NDArray[np.int64]:
    """Return the prompt tokens that a cache like the recorded one finds, shape [num_requests].

    The last token of a prompt is always computed. Requests whose times are unknown are served in an instant.
    """
    cache = ServedCache(measured)
    found = np.zeros(trace.num_requests, dtype=np.int64)
    times_s = trace.timestamps_s[:, None] + np.nan_to_num(trace.held_s)
    later: list[tuple[float, int, int, Running]] = []
    """Heap of what follows starts: time, request, how many blocks it grows to (0: it ends)."""
    for request in np.argsort(times_s[:, 0], kind="stable").tolist():
        start_s, first_s, end_s = times_s[request].tolist()
        _go_on(start_s, later, cache, trace)
        running = Running(trace.blocks_of(request), trace.session_of(request))
        num_prompt = trace.num_prompt_blocks.item(request)
        found[request] = cache.start(running, num_prompt, start_s)
        num_blocks = -(-len(running.chain) // measured.server_block)
        num_steps = num_blocks - running.num_blocks
        for step in range(num_steps):
            grows_s = first_s + (end_s - first_s) * (step + 0.5) / num_steps
            heappush(later, (grows_s, request, running.num_blocks + step + 1, running))
        heappush(later, (end_s, request, 0, running))
    _go_on(np.inf, later, cache, trace)
    return np.minimum(found * trace.block_size, np.maximum(trace.input_tokens - 1, 0))


def _go_on(
    now: float, later: list[tuple[float, int, int, Running]], cache: ServedCache, trace: Trace
) -> None:
    """Let running requests grow and end until `now`, in order."""
    while later and later[0][0] <= now:
        time_s, request, num_blocks, running = heappop(later)
        if num_blocks:
            cache.grow(running, num_blocks, time_s)
        else:
            cache.end(running, time_s, trace.conclusion_of(request))
