"""The contract of an eviction policy: it ranks candidates, nothing else.

The index owns the structure and knows *which* blocks may be evicted: the tails of leaves that nobody pins. It
offers each such block to the policy (`offer`) and withdraws it when the block gets a descendant or a pin
(`withdraw`). The policy says which candidate is evicted first (`victim`). It never sees tokens, nodes or
tiers, so the same class runs in the live server, in a lower tier, and in trace replay.

A policy that raises is replaced (`fallback.py`), so its errors affect only the ranking.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from stemma.types import NO_HINT, BlockIds, Fingerprints, RetentionHint


@dataclass(frozen=True, slots=True)
class HintedRun:
    """The retention hint of blocks ``[start, end)`` of an insert."""

    start: int
    end: int
    hint: RetentionHint


@dataclass(frozen=True, slots=True)
class BlockTraits:
    """Facts about the blocks of one insert apart from their tokens. Arrays have one entry per block."""

    fingerprints: Fingerprints | None = None
    """Identity across evictions; None: a policy with memory treats every inserted block as new."""
    costs_s: npt.NDArray[np.float32] | None = None
    """Time to recompute each block, in any unit, the same for all blocks; None: all equal."""
    hint: RetentionHint = NO_HINT
    leading: tuple[HintedRun, ...] = ()
    """Hints of the leading blocks, without gaps, where they differ from `hint`."""
    owner: str = ""
    """Whose blocks they are (`Namespace.owner`). The index sets it; callers leave it alone."""
    is_use: bool = True
    """False: nobody came back to them; they were loaded ahead of the turn that may."""
    session: int = 0
    """Number of the conversation that the client says these are of (`sessions.py`); 0: it doesn't say."""
    came_from: int = 0
    """Where it doesn't say: of the conversation that left them, as a lower tier kept it; 0: none."""
    after: int = -1
    """The block before the first of them, -1 at the root. The index sets it; callers leave it alone."""

    def runs(self, num_blocks: int) -> list[HintedRun]:
        """Return the hints of `num_blocks` blocks, without gaps."""
        runs = [
            HintedRun(run.start, min(run.end, num_blocks), run.hint)
            for run in self.leading
            if run.start < num_blocks
        ]
        start = runs[-1].end if runs else 0
        if start < num_blocks:
            runs.append(HintedRun(start, num_blocks, self.hint))
        return runs

    def part(self, start: int, end: int | None = None) -> BlockTraits:
        """Return the traits of blocks ``[start, end)``."""
        prints, costs_s = self.fingerprints, self.costs_s
        return replace(
            self,
            fingerprints=None if prints is None else prints[start:end],
            costs_s=None if costs_s is None else costs_s[start:end],
            leading=tuple(
                HintedRun(max(0, run.start - start), run.end - start, run.hint)
                for run in self.leading
                if run.end > start
            ),
        )


DEFAULT_TRAITS = BlockTraits()


class Ending(IntEnum):
    """Who goes on after an answer."""

    UNKNOWN = 0
    TOOL = 1
    """A tool that the answer calls: the conversation comes back by itself, mostly within seconds."""
    TURN = 2
    """Somebody who reads it, or nobody."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What is known once the request that used a chain has ended."""

    ending: Ending = Ending.UNKNOWN
    num_output_tokens: int = 0
    tools: tuple[str, ...] = ()
    """Names, or hashes of names, of the tools that the answer calls; empty if none, or nobody knows."""


NO_CONCLUSION = Conclusion()
"""Of a request that runs, or of which nothing is known."""


class EvictionPolicy(ABC):
    """Ranks evictable blocks. Block ids are small ints, dense and reused; `now` never decreases.

    Every method is amortised O(log n) or better per block.
    """

    name: ClassVar[str]

    def reserved_bytes(self, num_blocks: int) -> int:
        """Return the approximate maximum bytes that the policy takes for `num_blocks` blocks."""
        return 200 * num_blocks

    @abstractmethod
    def insert(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:
        """Blocks entered the index, in order from the root (`traits` arrays are aligned with them)."""

    @abstractmethod
    def access(self, block_ids: BlockIds, now: float) -> None:
        """Blocks already in the index were used again, in order from the root."""

    def conclude(self, block_ids: BlockIds, conclusion: Conclusion) -> None:  # noqa: B027 - most don't ask
        """A request ended that used these blocks, in order from the root; it may be told again, better.

        Others may have used some of them since.
        """

    def hint(self, block_ids: BlockIds, now: float, traits: BlockTraits) -> None:  # noqa: B027 - most ignore hints
        """The retention hints of blocks that are no candidates now are those of `traits` from here on."""

    @abstractmethod
    def offer(self, block_id: int) -> None:
        """The block may be evicted from now on. It has been inserted before."""

    @abstractmethod
    def withdraw(self, block_id: int) -> None:
        """The block may no longer be evicted (it got a descendant or a pin)."""

    @abstractmethod
    def victim(self, now: float) -> int | None:
        """Return the candidate to evict first, or None; it stays a candidate until `drop`."""

    @abstractmethod
    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        """The block left the index: evicted for room, or (False) superseded or flushed.

        It is no candidate any more (it need not have been one); its id may be inserted again.
        """
