"""What draws depend on beside logits, as a device reads it: one array of words, whatever the rules are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

ROW = np.dtype(
    [
        (name, "i4")
        for name in ("mask_at", "seen_at", "num_seen", "added_at", "num_added", "is_greedy", "top_k")
    ]
    + [(name, "f4") for name in ("temperature", "min_p", "repetition", "frequency", "presence")]
    + [("uniform", "f8"), ("top_p", "f8")]
)
"""Numbers of one row: 16 words. `mask_at` is where the bits of the ids that may be drawn begin, negative: all
may. At `seen_at` are the ids that penalties count, then how often each stands in the output, at `added_at`
ids and what is added to their logits behind the penalties. Greedy rows have temperature 1."""


@dataclass(frozen=True, slots=True)
class DrawRules:
    """The rules of R rows."""

    rows: npt.NDArray[np.void]
    """[R] of `ROW`, in which this fills in where things lie."""
    masks: dict[int, npt.NDArray[np.uint8]]
    """By row: a bit for each id, the lowest first, whole words of 4 bytes."""
    seen: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]
    """By row: distinct ids and their counts."""
    added: dict[int, dict[int, float]]
    """By row: what is added to the logits of ids."""

    @classmethod
    def greedy(cls, num_rows: int) -> DrawRules:
        """Return the rules of rows that take the most likely token."""
        rows = np.zeros(num_rows, dtype=ROW)
        rows["is_greedy"], rows["temperature"] = 1, 1.0
        return cls(rows, {}, {}, {})

    def words(self) -> npt.NDArray[np.int32]:
        """Return all of it, an even number of words; rows stand first."""
        parts = [self.rows.view(np.int32)]
        end = len(parts[0])

        def place(*some: npt.NDArray[np.generic]) -> int:
            nonlocal end
            at = end
            parts.extend(one.view(np.int32) for one in some)
            end += sum(len(one) for one in parts[-len(some) :])
            return at

        self.rows["mask_at"] = -1
        for row, mask in self.masks.items():
            self.rows["mask_at"][row] = place(mask)
        for row, (ids, counts) in self.seen.items():
            self.rows["num_seen"][row] = len(ids)
            self.rows["seen_at"][row] = place(ids.astype(np.int32), counts.astype(np.float32))
        for row, changes in self.added.items():
            ids = np.fromiter(changes, dtype=np.int32)
            values = np.fromiter(changes.values(), dtype=np.float32)
            self.rows["num_added"][row] = len(ids)
            self.rows["added_at"][row] = place(ids, values)
        place(np.zeros(end % 2, dtype=np.int32))
        return np.concatenate(parts)


Choose: TypeAlias = Callable[[torch.Tensor, DrawRules], torch.Tensor]
"""Draws tokens [R] int64 from logits [R, V] float32, which it leaves as they are, on their device, and waits
for nothing. Tokens are those that `engine/sampling/sampler.py` defines: of equal logits greedy rows take the
first, others walk the ids by the row's random number; rules that leave no token are ignored."""
