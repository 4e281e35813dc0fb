"""A whole trace in columns: what replay, the clairvoyant bound and the statistics read.

Ids are renumbered densely in order of first sight, so a block id doubles as the "token" of a prefix index
with `block_size=1`. 10 million blocks take some 40 MB here and some 400 MB while they are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stemma.errors import ConfigError
from stemma.prefix.eviction.policy import Conclusion, Ending
from stemma.types import TokenArray
from stemma_lab.traces.request import Measured, RawIds, TraceRequest
from stemma_lab.traces.version import TraceVersion

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. Request r has blocks ``block_ids[offsets[r]:offsets[r + 1]]``."""

    name: str
    block_size: int
    """Tokens a block of the trace; the last block of a prompt may hold fewer."""
    timestamps_s: npt.NDArray[np.float64]
    input_tokens: Int64
    output_tokens: Int64
    num_prompt_blocks: Int64
    """Blocks of each request that are looked up; the rest is only entered (generated tokens)."""
    offsets: Int64
    """Shape [num_requests + 1]."""
    block_ids: TokenArray
    """Dense ids, 0..num_unique_blocks-1, in order of first sight."""
    num_unique_blocks: int
    sessions: Int64
    """-1 where unknown."""
    turns: Int64
    """0 where unknown."""
    cached_tokens: Int64
    """Prompt tokens that the server found cached on its device; -1 where unknown."""
    endings: Int64
    """Who went on after each answer: values of `Ending`."""
    tools: Int64
    """What each answer calls: equal numbers stand for the same tools, -1 for none, or unknown ones."""
    held_s: npt.NDArray[np.float64]
    """Shape [num_requests, 3]: seconds from arrival until each request got its blocks, had its first token,
    and freed its blocks; NaN where unknown."""
    gaps_s: npt.NDArray[np.float64]
    """Seconds from the end of the session's answer before until each request came; NaN where unknown."""
    caveats: tuple[str, ...] = ()
    measured: Measured | None = None
    """The cache that `cached_tokens` tell of."""
    sha256: str = ""
    """Of the file; empty for a trace that was made up."""

    @property
    def version(self) -> TraceVersion:
        """What names this trace in figures."""
        return TraceVersion(self.name, self.sha256, self.num_requests)

    @property
    def num_requests(self) -> int:
        """Requests in the trace."""
        return len(self.timestamps_s)

    @property
    def num_blocks(self) -> int:
        """Blocks over all requests, repeated ones counted each time."""
        return len(self.block_ids)

    @property
    def num_looked_up_blocks(self) -> int:
        """Blocks of prompts: the denominator of the block hit ratio."""
        return int(self.num_prompt_blocks.sum())

    def blocks_of(self, request: int) -> TokenArray:
        """Return the chain of one request (a view)."""
        return self.block_ids[self.offsets[request] : self.offsets[request + 1]]

    def conclusion_of(self, request: int) -> Conclusion:
        """Return what a server knows once this request has ended."""
        number = self.tools.item(request)
        tools = (str(number),) if number >= 0 else ()
        return Conclusion(Ending(self.endings.item(request)), self.output_tokens.item(request), tools)

    def session_of(self, request: int) -> int:
        """Return the number of a request's conversation as a policy gets it: 0 where unknown."""
        return self.sessions.item(request) + 1

    @cached_property
    def request_of_block(self) -> npt.NDArray[np.int32]:
        """Which request each entry of `block_ids` belongs to."""
        return np.repeat(np.arange(self.num_requests, dtype=np.int32), np.diff(self.offsets))

    @cached_property
    def depth_of_block(self) -> npt.NDArray[np.int32]:
        """Position of each entry of `block_ids` in its request, from 0."""
        start = np.repeat(self.offsets[:-1], np.diff(self.offsets))
        return (np.arange(self.num_blocks) - start).astype(np.int32)

    @cached_property
    def previous_use(self) -> npt.NDArray[np.int64]:
        """Position in `block_ids` of the previous use of each entry's block; -1 for a first use."""
        return _link(self.block_ids, self.num_unique_blocks)

    @cached_property
    def next_request(self) -> npt.NDArray[np.int32]:
        """The request that uses each entry's block next; `num_requests` if none does."""
        result = np.full(self.num_blocks, self.num_requests, dtype=np.int32)
        seen = np.flatnonzero(self.previous_use >= 0)
        result[self.previous_use[seen]] = self.request_of_block[seen]
        return result

    def head(self, num_requests: int) -> Trace:
        """Return the trace cut after `num_requests`."""
        num = min(num_requests, self.num_requests)
        end = int(self.offsets[num])
        ids = self.block_ids[:end]
        return replace(
            self,
            timestamps_s=self.timestamps_s[:num],
            input_tokens=self.input_tokens[:num],
            output_tokens=self.output_tokens[:num],
            num_prompt_blocks=self.num_prompt_blocks[:num],
            offsets=self.offsets[: num + 1],
            block_ids=ids,
            num_unique_blocks=int(ids.max()) + 1 if end else 0,
            sessions=self.sessions[:num],
            turns=self.turns[:num],
            cached_tokens=self.cached_tokens[:num],
            endings=self.endings[:num],
            tools=self.tools[:num],
            held_s=self.held_s[:num],
            gaps_s=self.gaps_s[:num],
        )


def collect(
    name: str,
    block_size: Callable[[], int],
    requests: Iterable[TraceRequest],
    caveats: tuple[str, ...] = (),
) -> Trace:
    """Read all requests into columns, sorted by arrival (stable). Raises ConfigError if there are none.

    `block_size` is asked at the end: a trace may state it in a header line.

    Ids that occur behind different predecessors are not chained prefix ids; they are chained here, since
    equal blocks behind different prefixes have different KV.
    """
    timestamps: list[float] = []
    counts: list[tuple[int, ...]] = []
    chains: list[RawIds] = []
    held: list[tuple[float, float, float]] = []
    gaps: list[float] = []
    tools: dict[tuple[str, ...], int] = {(): -1}
    for request in requests:
        timestamps.append(request.timestamp_s)
        called = tools.setdefault(request.tools, len(tools) - 1)
        counts.append((*_counts(request), called))
        gaps.append(np.nan if request.gap_s is None else request.gap_s)
        held.append(request.held_s or (np.nan, np.nan, np.nan))
        chains.append(request.block_ids)
    if not timestamps:
        raise ConfigError(f"{name}: the trace has no requests")
    times = np.asarray(timestamps, dtype=np.float64)
    order = np.argsort(times, kind="stable")
    if np.any(order[1:] < order[:-1]):
        chains = [chains[i] for i in order]
    columns = np.asarray(counts, dtype=np.int64)[order]
    num_blocks = np.asarray([len(chain) for chain in chains], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.int64)
    raw = np.concatenate(chains)
    del chains
    block_ids, num_unique = _densify(raw, offsets)
    return Trace(
        name=name,
        block_size=block_size(),
        timestamps_s=times[order] - times.min(),
        input_tokens=columns[:, 0],
        output_tokens=columns[:, 1],
        num_prompt_blocks=columns[:, 2],
        offsets=offsets,
        block_ids=block_ids,
        num_unique_blocks=num_unique,
        sessions=columns[:, 3],
        turns=columns[:, 4],
        cached_tokens=columns[:, 5],
        endings=_endings(columns[:, 3], columns[:, 6], columns[:, 7]),
        tools=columns[:, 8],
        held_s=np.asarray(held, dtype=np.float64)[order],
        gaps_s=np.asarray(gaps, dtype=np.float64)[order],
        caveats=caveats,
    )


def _counts(request: TraceRequest) -> tuple[int, ...]:
    """Return lengths, session, turn, cached tokens, and who went on after the answer and the one before."""
    session = -1 if request.session is None else request.session
    turn = 0 if request.turn is None else request.turn
    cached = -1 if request.num_cached_tokens is None else request.num_cached_tokens
    lengths = (request.input_tokens, request.output_tokens, request.num_prompt_blocks)
    return (*lengths, session, turn, cached, int(request.ending), int(request.follows))


def _endings(sessions: Int64, endings: Int64, follows: Int64) -> Int64:
    """Return who went on after each answer, also where only the session's next request tells it."""
    told = endings.copy()
    latest: dict[int, int] = {}
    for request, (session, ending) in enumerate(zip(sessions.tolist(), follows.tolist(), strict=True)):
        before = latest.get(session)
        if before is not None and ending != Ending.UNKNOWN and told[before] == Ending.UNKNOWN:
            told[before] = ending
        if session >= 0:
            latest[session] = request
    return told


def _densify(raw: RawIds, offsets: Int64) -> tuple[TokenArray, int]:
    """Renumber ids in order of first sight; chain them first if they aren't."""
    _, first, inverse = np.unique(raw, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    ids = rank[inverse]
    if _is_chained(ids, offsets, len(first)):
        return ids, len(first)
    return _chain(ids, offsets)


def _parents(ids: TokenArray, offsets: Int64) -> TokenArray:
    """Return the predecessor of each entry, -1 at the start of a request."""
    parents = np.empty_like(ids)
    if len(ids):
        parents[1:] = ids[:-1]
        starts = offsets[:-1]
        parents[starts[starts < len(ids)]] = -1
    return parents


def _is_chained(ids: TokenArray, offsets: Int64, num_unique: int) -> bool:
    parents = _parents(ids, offsets)
    parent_of = np.full(num_unique, -2, dtype=np.int32)
    parent_of[ids] = parents
    return bool(np.array_equal(parent_of[ids], parents))


def _chain(ids: TokenArray, offsets: Int64) -> tuple[TokenArray, int]:
    known: dict[tuple[int, int], int] = {}
    chained = np.empty_like(ids)
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        parent = -1
        for position, item in enumerate(ids[start:end].tolist(), start=start):
            parent = known.setdefault((parent, item), len(known))
            chained[position] = parent
    return chained, len(known)


def _link(ids: TokenArray, num_unique: int) -> npt.NDArray[np.int64]:
    """Return for each entry the position of the previous entry with the same id, or -1."""
    order = np.argsort(ids, kind="stable")
    previous = np.full(len(ids), -1, dtype=np.int64)
    same = ids[order[1:]] == ids[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous
