"""Frees that wait until nobody writes into the blocks: until a step has ended, or a load from a lower tier.

These are the books alone; `leased_blocks.py` frees what they give back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from stemma.memory.cache.lease import Lease
from stemma.types import BlockIds


@dataclass(slots=True)
class Fence:
    """A step under way, and what was freed since it was launched: the step may still use these blocks."""

    leases: list[Lease] = field(default_factory=list)
    duplicates: list[BlockIds] = field(default_factory=list)


class LateFrees:
    """Freed leases and duplicates of cached blocks that wait. Not thread-safe."""

    def __init__(self) -> None:
        self._fences: deque[Fence] = deque()
        self._loading: list[Lease] = []

    @property
    def has_fence(self) -> bool:
        """Whether a step is under way: what is freed now has to wait."""
        return bool(self._fences)

    def open_fence(self) -> None:
        """A step is launched."""
        self._fences.append(Fence())

    def close_fence(self) -> Fence:
        """The oldest step under way has ended; return what can be freed."""
        return self._fences.popleft()

    def after_step(self, lease: Lease) -> None:
        """Let the blocks of a lease wait for the end of the steps under way."""
        self._fences[-1].leases.append(lease)

    def duplicates_after_step(self, block_ids: BlockIds) -> None:
        """Let blocks that a lease no longer has wait for the end of the steps under way."""
        self._fences[-1].duplicates.append(block_ids)

    @property
    def loading(self) -> tuple[Lease, ...]:
        """Those that wait for the end of a load."""
        return tuple(self._loading)

    def after_load(self, lease: Lease) -> None:
        """Let the blocks of a lease wait for the end of the load that it has pending."""
        self._loading.append(lease)

    def loaded(self) -> list[Lease]:
        """Return those whose load has ended; `remove` each before its blocks are freed."""
        return [one for one in self._loading if one.pending and one.pending.num_loaded.done()]

    def remove(self, lease: Lease) -> None:
        """Take out a lease whose load has ended."""
        self._loading.remove(lease)

    def leases(self) -> Iterator[Lease]:
        """Yield all leases that wait."""
        yield from self._loading
        for fence in self._fences:
            yield from fence.leases

    def duplicates(self) -> Iterator[BlockIds]:
        """Yield all duplicates that wait."""
        for fence in self._fences:
            yield from fence.duplicates
