"""Masks of structured output, computed while the step that needs them runs.

What a grammar allows next depends on the tokens before, which are known when a step starts: its drafts too.
So one thread computes the masks of all rows of a step, in one call of llguidance that doesn't hold Python's
lock, beside the model. The sampler finds them ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from stemma.engine.sampling.constraints import Constraints, ReadyMasks


class MaskAhead:
    """Computes masks for the step loop. Its thread is started at the first request that has a grammar."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread: ThreadPoolExecutor | None = None
        self._llguidance: Any = None

    def start(self, wanted: Sequence[tuple[Constraints, Sequence[int]]]) -> Future[None] | None:
        """Prepare constraints that have a grammar for the rows after each draft; None if there are none.

        Nobody may use them before the result is there.
        """
        if not wanted:
            return None
        if self._thread is None:
            from llguidance import LLExecutor

            # One thread: the model's own have the other cores.
            self._llguidance = LLExecutor(num_threads=1)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="stemma-masks")
        return self._thread.submit(self._prepare, wanted)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _prepare(self, wanted: Sequence[tuple[Constraints, Sequence[int]]]) -> None:
        starts, row = [], 0
        for _, draft in wanted:
            starts.append(row)
            row += 1 + len(draft)
        bits = np.zeros((row, (self._vocab_size + 31) // 32), dtype=np.int32)
        target = (bits.ctypes.data, bits.strides[0], row)
        placed = [
            (one.matcher, start, list(draft)) for (one, draft), start in zip(wanted, starts, strict=True)
        ]
        if plain := [(matcher, start) for matcher, start, draft in placed if not draft]:
            self._llguidance.unsafe_compute_mask_ptr(plain, *target)
        if drafted := [one for one in placed if one[2]]:
            self._llguidance.unsafe_compute_mask_ptr_with_draft_token(drafted, *target)
        is_usable = [bool(row.any()) for row in bits]
        packed = bits.view(np.uint8)
        for (constraints, draft), start in zip(wanted, starts, strict=True):
            rows = slice(start, start + 1 + len(draft))
            constraints.prepare(ReadyMasks(packed[rows], is_usable[rows]))
