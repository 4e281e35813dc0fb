"""Recurrent layers token by token, with torch alone: the path without kernels, and the reference of these.

See native/scan.h for what the layers compute, and why one token after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F


@dataclass(slots=True)
class SequenceRows:
    """The rows of one sequence in a step, and one part of its state: float32 tensors of the part's shape."""

    rows: range
    initial: torch.Tensor | None
    """Before the first row; None: zeros."""
    last: torch.Tensor
    """Where the state behind the last row goes; it may be `initial`."""
    snapshots: Sequence[tuple[int, torch.Tensor]] = field(default=())
    """Rows, ascending, behind which the state is copied, and where to."""


class Recurrence(Protocol):
    """Computes recurrent layers; all tensors are float32 and contiguous."""

    def convolve(
        self,
        sequences: Sequence[SequenceRows],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_activated: bool,
    ) -> torch.Tensor:
        """Return the causal convolution of x [T, C] by weight [width, C], by silu if `is_activated`.

        States are [width - 1, C]: the last inputs.
        """

    def scan(
        self,
        sequences: Sequence[SequenceRows],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return linear attention [T, H, V] of queries and keys [T, G, K], G a divisor of H, and values.

        `decay`: logarithms [T, H], or [T, H, K]. `beta` [T, H]: the delta rule; None: values are added as
        they are. States are [H, K, V].
        """

    def select(
        self,
        sequences: Sequence[SequenceRows],
        x: torch.Tensor,
        step: torch.Tensor,
        rate: torch.Tensor,
        inputs: torch.Tensor,
        projection: torch.Tensor,
        skip: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return Mamba's selective scan of x [T, C] by steps [T, C], rates [N, C] below 0, and a `skip` [C].

        `inputs` and `projection` [T, N] lead into the state and out of it. States are [N, C].
        """


class TorchRecurrence:
    """Recurrent layers by torch alone: the reference of the kernels' results."""

    def convolve(
        self,
        sequences: Sequence[SequenceRows],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_activated: bool,
    ) -> torch.Tensor:
        """Return the causal convolution of x [T, C] by weight [width, C]."""
        output = torch.empty_like(x)
        width = weight.shape[0]

        def advance(last: torch.Tensor, row: int) -> torch.Tensor:
            window = torch.cat((last, x[row : row + 1]))
            total = (window * weight).sum(0) + (0.0 if bias is None else bias)
            output[row] = F.silu(total) if is_activated else total
            return window[1:]

        _pass(sequences, (width - 1, x.shape[1]), advance, x.device)
        return output

    def scan(
        self,
        sequences: Sequence[SequenceRows],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return linear attention [T, H, V] of queries and keys [T, G, K] and values."""
        output = torch.empty_like(value)
        heads, value_dim = value.shape[1:]
        repeats = heads // key.shape[1]
        query, key = query.repeat_interleave(repeats, 1), key.repeat_interleave(repeats, 1)
        kept = (decay if decay.dim() == 3 else decay[..., None]).exp()[..., None]

        def advance(state: torch.Tensor, row: int) -> torch.Tensor:
            state = state * kept[row]
            added = value[row]
            if beta is not None:
                known = (state * key[row][..., None]).sum(1)
                added = (added - known) * beta[row][:, None]
            state = state + key[row][..., None] * added[:, None]
            output[row] = (state * query[row][..., None]).sum(1)
            return state

        _pass(sequences, (heads, key.shape[2], value_dim), advance, value.device)
        return output

    def select(
        self,
        sequences: Sequence[SequenceRows],
        x: torch.Tensor,
        step: torch.Tensor,
        rate: torch.Tensor,
        inputs: torch.Tensor,
        projection: torch.Tensor,
        skip: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the selective scan of a Mamba layer."""
        output = torch.empty_like(x)

        def advance(state: torch.Tensor, row: int) -> torch.Tensor:
            state = state * (step[row] * rate).exp() + inputs[row][:, None] * (step[row] * x[row])
            output[row] = (state * projection[row][:, None]).sum(0)
            if skip is not None:
                output[row] += skip * x[row]
            return state

        _pass(sequences, tuple(rate.shape), advance, x.device)
        return output


def _pass(
    sequences: Sequence[SequenceRows],
    shape: tuple[int, ...],
    advance: Callable[[torch.Tensor, int], torch.Tensor],
    device: torch.device,
) -> None:
    """Take each sequence's state through its rows."""
    for sequence in sequences:
        initial = sequence.initial
        state = torch.zeros(shape, device=device) if initial is None else initial.clone()
        wanted = dict[int, list[torch.Tensor]]()
        for row, target in sequence.snapshots:
            wanted.setdefault(row, []).append(target)
        for row in sequence.rows:
            state = advance(state, row)
            for target in wanted.get(row, ()):
                target.copy_(state)
        sequence.last.copy_(state)
