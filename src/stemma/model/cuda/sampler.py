"""A `Choose` in two launches, which wait for nothing and read bits of masks instead of numbers."""

from __future__ import annotations

from typing import Any

import torch
import triton

from stemma.model.cuda.sampler_kernels import adjust_logits, choose_tokens
from stemma.model.opened.draw_rules import DrawRules

_BLOCK, _PIECE, _EDITS = 128, 4096, 1024


def choose(logits: torch.Tensor, rules: DrawRules) -> torch.Tensor:
    """Return the tokens [R] int64 of logits [R, V] float32: see `Choose`."""
    num_rows, vocab_size = logits.shape
    num_blocks, device = -(-vocab_size // _BLOCK), logits.device
    padded = triton.next_power_of_2(num_blocks)
    numbers = torch.from_numpy(rules.words()).to(device, non_blocking=True)
    floats, doubles = numbers.view(torch.float32), numbers.view(torch.float64)
    scores, highest = logits.new_empty(num_rows, vocab_size), logits.new_empty(num_rows, 2, num_blocks)
    room = logits.new_empty(2, num_rows, padded)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    piece = min(_PIECE, padded * _BLOCK)
    adjust: Any = adjust_logits[(num_rows, -(-vocab_size // piece))]
    adjust(
        logits,
        numbers,
        floats,
        scores,
        highest,
        logits.stride(0),
        vocab_size,
        vocab_size,
        num_blocks,
        PIECE=piece,
        EDITS=_EDITS,
        num_warps=8,
    )
    draw: Any = choose_tokens[(num_rows,)]
    draw(
        scores,
        highest,
        numbers,
        floats,
        doubles,
        room[0].view(torch.int32),
        room[1],
        tokens,
        vocab_size,
        vocab_size,
        num_blocks,
        BLOCKS=padded,
        num_warps=16,
        maxnreg=128,
    )
    return tokens
