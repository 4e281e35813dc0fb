"""Where a step's recurrent states lie, as kernels read it from device memory (`recurrent_kernels.py`).

int32 numbers, one behind the other, at places that follow from the step's rows alone:

    the number of sequences, up to HEADER
    | of each row: its number in its sequence (padding: -1), and the state before it
    | of each sequence: its first row, the state before it, its first stop, the stop behind its last
    | of each stop: the row before which it is, and where the state there goes

States are named by their first block; -1: zeros. There is room for as many sequences as rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch

HEADER = 16


@dataclass(frozen=True, slots=True)
class StateList:
    """The list of a step in device memory."""

    numbers: torch.Tensor
    """int32."""
    at: int
    """Where it begins."""
    num_rows: int

    @property
    def rows_at(self) -> int:
        """Where rows are."""
        return self.at + HEADER

    @property
    def places(self) -> tuple[int, int, int]:
        """Where the number of sequences is, the sequences are, and the stops."""
        return self.at, self.rows_at + 2 * self.num_rows, self.rows_at + 6 * self.num_rows


def list_states(batch: ForwardBatch, num_rows: int, kv: DeviceKV) -> npt.NDArray[np.int32]:
    """Return the list of a step of `num_rows` rows, padding included; nothing if the model has no states."""
    if kv.layout.state is None:
        return np.zeros(0, dtype=np.int32)
    rows, sequences = np.full((num_rows, 2), -1, dtype=np.int32), np.zeros((num_rows, 4), dtype=np.int32)
    header, stops = np.zeros(HEADER, dtype=np.int32), np.zeros((0, 2), dtype=np.int32)
    if (moves := batch.states) is not None:
        first, states = np.array(batch.query_starts[:-1]), _places(kv, (*moves.last,))
        initial = _places(kv, moves.initial)
        counts, used = np.diff(batch.query_starts), batch.query_starts[-1]
        rows[:used, 0] = np.arange(used) - np.repeat(first, counts)
        rows[:used, 1] = np.repeat(initial, counts)
        kept = np.array([row for row, _ in moves.snapshots], dtype=np.int64)
        behind = np.concatenate((kept + 1, batch.query_starts[1:]))
        order = np.argsort(behind, kind="stable")  # the last state of a sequence behind those that are kept
        targets = np.concatenate((_places(kv, [state for _, state in moves.snapshots]), states))
        stops = np.stack((behind, targets), axis=1)[order].astype(np.int32)
        ends = np.flatnonzero(order >= len(kept)) + 1
        header[0] = len(states)
        sequences[: len(states)] = np.stack((first, initial, ends - np.diff(ends, prepend=0), ends), axis=1)
    return np.concatenate([part.reshape(-1) for part in (header, rows, sequences, stops)])


def _places(kv: DeviceKV, states: tuple[int | None, ...] | list[int]) -> npt.NDArray[np.int64]:
    found = [-1 if state is None else kv.state_blocks(state).start for state in states]
    return np.array(found, dtype=np.int64)
