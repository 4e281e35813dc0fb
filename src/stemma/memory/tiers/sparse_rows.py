"""Memory whose rows take pages only where they were written, for blocks that are kept packed."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from stemma.errors import ConfigError
from stemma.memory.tiers.slot_room import paged

_MAP_NORESERVE = 0x4000
"""Python names it from 3.13 on."""


class SparseRows:
    """uint8 [num_rows, row_bytes]; each row begins at a page."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        """Raises ConfigError if the system doesn't give addresses."""
        self._stride = paged(row_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, num_rows * self._stride, flags=flags)
            # A huge page would take all of its bytes for one that is touched.
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError as error:
            raise ConfigError(
                f"no addresses for a host cache of packed blocks ({error.strerror}); "
                "--tier-compression off needs fewer"
            ) from error
        whole = np.frombuffer(self._map, np.uint8).reshape(num_rows, self._stride)
        self.rows: npt.NDArray[np.uint8] = whole[:, :row_bytes]

    def discard(self, row: int, unused: range) -> None:
        """Give back the pages of these bytes of a row."""
        if unused:
            self._map.madvise(mmap.MADV_DONTNEED, row * self._stride + unused.start, len(unused))
