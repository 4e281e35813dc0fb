"""Where states and pages lie on the device, and under which keys the tiers below know their blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stemma.memory.device.layout import WindowGroup
from stemma.memory.device.slabs import SlabAllocator
from stemma.types import BlockKey

_STATE, _PAGE = b"stemma.state", b"stemma.window"


@dataclass(frozen=True, slots=True)
class Places:
    """Where states and pages lie on the device."""

    slabs: SlabAllocator
    """Of the memory that they share with the blocks."""
    states_per_slab: int
    state_blocks: Callable[[int], range]
    """Takes a state; returns the ids of its blocks."""
    pages_per_slab: int = 0
    page_blocks: Callable[[int], range] = lambda _page: range(0)
    copy_page: Callable[[int, int], None] = lambda _source, _target: None
    windows: WindowGroup | None = None
    """Layers with windows, which have pages; None: there are none."""
    num_reserved: int = 0
    """Blocks that no sequence can have: room for its states and pages."""


class Pieces:
    """The blocks of a checkpoint, by its position."""

    def __init__(self, places: Places, block_size: int) -> None:
        self._places, self._block_size = places, block_size

    def first_block(self, position: int) -> int:
        """Return the first block whose keys a token at `position` or later may see through a window."""
        assert self._places.windows is not None
        return self._places.windows.first_seen(position) // self._block_size

    def window_blocks(self, position: int) -> range:
        """Return the full blocks before `position` that tokens from there on see through a window."""
        if self._places.windows is None:
            return range(0)
        return range(self.first_block(position), position // self._block_size)

    def chain(self, key_of: Callable[[int], BlockKey], position: int) -> list[tuple[BlockKey, BlockKey]]:
        """Return key and parent of each block of a checkpoint: its state's, then its pages'."""
        chain: list[tuple[BlockKey, BlockKey]] = []

        def add(kind: bytes, key: BlockKey, count: int) -> None:
            parent = key
            for number in range(count):
                piece = BlockKey(hashlib.sha256(kind + number.to_bytes(4, "little") + key).digest())
                chain.append((piece, parent))
                parent = piece

        if self._places.states_per_slab:
            add(_STATE, key_of(position // self._block_size - 1), len(self._places.state_blocks(0)))
        for block in self.window_blocks(position):
            add(_PAGE, key_of(block), len(self._places.page_blocks(0)))
        return chain

    def blocks_of(self, state: int | None, pages: Iterable[int]) -> list[int]:
        """Return the ids of the blocks of a state and pages."""
        blocks = [] if state is None else list(self._places.state_blocks(state))
        return blocks + [block for page in pages for block in self._places.page_blocks(page)]
