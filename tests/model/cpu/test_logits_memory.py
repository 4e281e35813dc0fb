"""Logits' memory goes from step to step, and never to a second tensor while the first is in use."""

from __future__ import annotations

import torch

from stemma.model.cpu.logits_memory import LogitsMemory

ROWS, VOCAB = 256, 20_000
"""20 MB: more than is left to malloc."""


def test_the_next_step_takes_the_memory_over() -> None:
    memory = LogitsMemory()
    first = memory.take(ROWS, VOCAB)
    address = first.data_ptr()
    del first
    smaller = memory.take(ROWS - 40, VOCAB)
    assert smaller.data_ptr() == address
    assert smaller.shape == (ROWS - 40, VOCAB)
    assert smaller.is_contiguous()


def test_logits_in_use_are_never_given_away() -> None:
    memory = LogitsMemory()
    logits = memory.take(ROWS, VOCAB)
    logits.fill_(1.0)
    rows = logits[3:5]
    del logits
    memory.take(ROWS, VOCAB).zero_()
    array = rows.detach().numpy()
    del rows
    memory.take(ROWS, VOCAB).zero_()
    assert array.min() == 1.0


def test_two_at_once_have_their_own_and_the_larger_is_kept() -> None:
    memory = LogitsMemory()
    small, large = memory.take(ROWS, VOCAB), memory.take(ROWS + 1, VOCAB)
    small.zero_()
    large.fill_(1.0)
    assert small.max() == 0.0
    address = large.data_ptr()
    del small, large
    assert memory.take(ROWS + 1, VOCAB).data_ptr() == address


def test_a_few_rows_are_left_to_malloc() -> None:
    tensor = LogitsMemory().take(2, VOCAB)
    assert tensor.shape == (2, VOCAB)
    assert tensor.dtype == torch.float32
    assert LogitsMemory().take(0, VOCAB).shape == (0, VOCAB)
