"""Memory that packed weights lie in: together, so that huge pages hold them.

Reading weights is what a decode step does, and with pages of 4 kB a tenth of the time goes into finding
them. Linux maps 2 MB at a time where a program asks for it, which numpy does for arrays of 4 MB and more.
Most weights of a small model are smaller, so while a model loads they are cut out of larger arrays.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from stemma.native.early_memory import EarlyMemory

ARRAY_BYTES = 64 << 20
"""Pages that nothing was written to take no memory."""
_ALIGNMENT = 64


class _Arrays(threading.local):
    """The memory that the loading thread cuts from."""

    rooms: list[torch.Tensor] | None = None
    """What is left of the memory that was made ready, and of the last array; None: a weight gets its own."""
    last: int | None = None
    """The room that was cut last; None: a weight got an array of its own."""


_arrays = _Arrays()


@contextmanager
def weights_together(early: EarlyMemory | None = None) -> Iterator[None]:
    """Let weights of this thread lie beside each other; an array is freed with the last weight in it.

    `early`: memory that was made ready for them, closed at the end; what is left of it is given back.
    """
    assert _arrays.rooms is None
    ready = None if early is None else early.take()
    first = _zeros(0) if ready is None else torch.frombuffer(ready, dtype=torch.uint8)
    _arrays.rooms = rooms = [first, _zeros(0)]
    try:
        yield
    finally:
        if early is not None:
            early.close()
        if ready is not None:
            _give_back_end(ready, len(rooms[0]))
        _arrays.rooms = None


def weight_memory(num_bytes: int) -> torch.Tensor:
    """Return uint8 [num_bytes] on CPU, zeroed, beginning at a multiple of 64."""
    rooms = _arrays.rooms
    _arrays.last = None
    if rooms is None:
        return _zeros(num_bytes)
    if len(rooms[1]) < num_bytes <= ARRAY_BYTES and len(rooms[0]) < num_bytes:
        rooms[1] = _zeros(ARRAY_BYTES)
    for number, room in enumerate(rooms):
        if len(room) >= num_bytes:
            rooms[number], _arrays.last = room[_aligned(num_bytes) :], number
            return room[:num_bytes]
    return _zeros(num_bytes)


def give_back(memory: torch.Tensor) -> None:
    """Let the next weight have what `weight_memory` returned last."""
    rooms, last = _arrays.rooms, _arrays.last
    if rooms is not None and last is not None:
        memory.zero_()
        rooms[last] = memory.as_strided((_aligned(len(memory)) + len(rooms[last]),), (1,))
        _arrays.last = None


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _give_back_end(memory: mmap.mmap, num_bytes: int) -> None:
    """Let the system have the last bytes, though weights lie before them."""
    page = mmap.PAGESIZE
    first = -(-(len(memory) - num_bytes) // page) * page
    if first < len(memory):
        memory.madvise(mmap.MADV_DONTNEED, first, len(memory) - first)


def _zeros(num_bytes: int) -> torch.Tensor:
    array = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8))
    begin = -array.data_ptr() % _ALIGNMENT
    return array[begin : begin + num_bytes]
