"""Memory that packed weights lie in: together, so that huge pages hold them.

Reading weights is what a decode step does, and with pages of 4 kB a tenth of the time goes into finding
them. Linux maps 2 MB at a time where a program asks for it, which numpy does for arrays of 4 MB and more.
Most weights of a small model are smaller, so while a model loads they are cut out of larger arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from stemma.native.early_memory import PIECE_BYTES, EarlyMemory

_ARRAY_BYTES = PIECE_BYTES
"""Pages that nothing was written to take no memory."""
_ALIGNMENT = 64


class _Arrays(threading.local):
    """The memory that the loading thread cuts from; None: each weight gets an array of its own."""

    free: torch.Tensor | None = None
    early: EarlyMemory | None = None
    """Where arrays come from as long as it has any."""


_arrays = _Arrays()


@contextmanager
def weights_together(early: EarlyMemory | None = None) -> Iterator[None]:
    """Let weights of this thread lie beside each other; an array is freed with the last weight in it.

    `early`: memory that was made ready for them, closed at the end.
    """
    assert _arrays.free is None
    _arrays.free, _arrays.early = _zeros(0), early
    try:
        yield
    finally:
        if _arrays.early is not None:
            _arrays.early.close()
        _arrays.free = _arrays.early = None


def weight_memory(num_bytes: int) -> torch.Tensor:
    """Return uint8 [num_bytes] on CPU, zeroed, beginning at a multiple of 64."""
    free = _arrays.free
    if free is None or num_bytes > _ARRAY_BYTES:
        return _zeros(num_bytes)
    if len(free) < num_bytes:
        free = _array()
    _arrays.free = free[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
    return free[:num_bytes]


def give_back(memory: torch.Tensor) -> None:
    """Let the next weight have what `weight_memory` returned last."""
    free = _arrays.free
    if free is not None and len(memory) <= _ARRAY_BYTES:
        memory.zero_()
        cut = -(-len(memory) // _ALIGNMENT) * _ALIGNMENT
        _arrays.free = memory.as_strided((cut + len(free),), (1,))


def _array() -> torch.Tensor:
    piece = None if _arrays.early is None else _arrays.early.take()
    return _zeros(_ARRAY_BYTES) if piece is None else torch.frombuffer(piece, dtype=torch.uint8)


def _zeros(num_bytes: int) -> torch.Tensor:
    array = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8))
    begin = -array.data_ptr() % _ALIGNMENT
    return array[begin : begin + num_bytes]
