"""Recurrent layers in native code: what torch computes token by token, however the rows are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from stemma.model.attend.recurrence import Recurrence, SequenceRows, TorchRecurrence
from stemma.model.cpu.recurrence import NativeRecurrence
from stemma.native.library import load_kernels
from tests.native.isa import level_params

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

LENGTHS = (1, 37, 5)
"""Of the sequences of a step."""
Run = Callable[[Recurrence, Sequence[SequenceRows], slice], torch.Tensor]


def scan(heads: int, groups: int, key_dim: int, value_dim: int, *, delta: bool, by_key: bool) -> Run:
    torch.manual_seed(0)
    rows = sum(LENGTHS)
    query, key = torch.randn(rows, groups, key_dim), torch.randn(rows, groups, key_dim) * 0.3
    value = torch.randn(rows, heads, value_dim)
    decay = -torch.rand(rows, heads, key_dim) if by_key else -torch.rand(rows, heads)
    beta = torch.rand(rows, heads) if delta else None

    def run(recurrence: Recurrence, sequences: Sequence[SequenceRows], part: slice) -> torch.Tensor:
        own = None if beta is None else beta[part]
        return recurrence.scan(sequences, query[part], key[part], value[part], decay[part], own)

    return run


def select(channels: int, state_dim: int, *, skips: bool) -> Run:
    torch.manual_seed(0)
    rows = sum(LENGTHS)
    x, step = torch.randn(rows, channels), torch.rand(rows, channels)
    rate = -torch.rand(state_dim, channels)
    inputs, projection = torch.randn(rows, state_dim), torch.randn(rows, state_dim)
    skip = torch.randn(channels) if skips else None

    def run(recurrence: Recurrence, sequences: Sequence[SequenceRows], part: slice) -> torch.Tensor:
        return recurrence.select(sequences, x[part], step[part], rate, inputs[part], projection[part], skip)

    return run


def convolve(channels: int, width: int, *, biased: bool, is_activated: bool) -> Run:
    torch.manual_seed(0)
    x, weight = torch.randn(sum(LENGTHS), channels), torch.randn(width, channels)
    bias = torch.randn(channels) if biased else None

    def run(recurrence: Recurrence, sequences: Sequence[SequenceRows], part: slice) -> torch.Tensor:
        return recurrence.convolve(sequences, x[part], weight, bias, is_activated=is_activated)

    return run


CASES: dict[str, tuple[Run, tuple[int, ...]]] = {
    "delta": (scan(4, 2, 20, 12, delta=True, by_key=False), (4, 20, 12)),
    "delta by key": (scan(3, 3, 16, 70, delta=True, by_key=True), (3, 16, 70)),
    "added": (scan(6, 1, 33, 64, delta=False, by_key=False), (6, 33, 64)),
    "added by key": (scan(2, 2, 5, 17, delta=False, by_key=True), (2, 5, 17)),
    "select": (select(50, 7, skips=True), (7, 50)),
    "select plain": (select(16, 4, skips=False), (4, 16)),
    "convolve": (convolve(50, 4, biased=True, is_activated=True), (3, 50)),
    "convolve plain": (convolve(16, 3, biased=False, is_activated=False), (2, 16)),
}


def rows_of(states: torch.Tensor, snapshots: torch.Tensor) -> list[SequenceRows]:
    """The first sequence begins; the others go on. A state of each is kept behind its last row but one."""
    found, start = [], 0
    for number, length in enumerate(LENGTHS):
        rows = range(start, start + length)
        kept = [(rows[-2], snapshots[number])] if length > 1 else []
        initial = states[number] if number else None
        found.append(SequenceRows(rows, initial, states[number], kept))
        start += length
    return found


@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("case", CASES)
def test_equal_to_torch(case: str, isa: str) -> None:
    run, shape = CASES[case]
    kernels = load_kernels(isa)
    assert kernels is not None
    torch.manual_seed(1)
    before = torch.randn(len(LENGTHS), *shape)
    results = []
    for recurrence in (TorchRecurrence(), NativeRecurrence(kernels)):
        states, snapshots = before.clone(), torch.zeros_like(before)
        output = run(recurrence, rows_of(states, snapshots), slice(None))
        results.append((output, states, snapshots))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("case", CASES)
def test_same_bits_however_rows_are_cut(case: str, isa: str) -> None:
    run, shape = CASES[case]
    kernels = load_kernels(isa)
    assert kernels is not None
    native = NativeRecurrence(kernels)
    rows = sum(LENGTHS)
    whole_state = torch.empty(shape)
    whole = run(native, [SequenceRows(range(rows), None, whole_state)], slice(None))
    for cuts in ((1, 1, 20, 21), (42, 1), (1,) * 43):
        state, parts, start = torch.empty(shape), [], 0
        for count in cuts:
            one = SequenceRows(range(count), state if start else None, state)
            parts.append(run(native, [one], slice(start, start + count)))
            start += count
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(state, whole_state)
