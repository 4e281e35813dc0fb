"""Attention over a window of tokens and compressed entries of all tokens before (DeepSeek-V4).

An entry stands for `rate` tokens: a weighted mean of what the layer projects of them, by each number's own
softmax over the tokens (of their window, or of it and the window before). A query sees the tokens of its
sliding window, and of the entries whose last token isn't behind it all, or those that an indexer scores
highest (selection.py). Keys are values. Windows of entries begin at multiples of `rate`, so an entry depends
on nothing but the tokens before its end.

A token's row, in a page, is [key ; what entries are made of]. An entry, in the block of its last token, is
[key ; index key].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stemma.memory.device.layout import CompressedLayer
from stemma.model.selection import Selection


@dataclass(frozen=True, slots=True)
class Compression:
    """What a layer keeps of its tokens, and how it makes entries of them."""

    kept: CompressedLayer
    span: int = 0
    """Tokens that an entry is made of, the last of its own among them; 0: the layer makes no entries."""
    make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Takes rows of tokens [n, span, row_dim] and the entries' numbers [n]; returns entries [n, entry_dim].
    Rows before a sequence's first token are any."""
    selection: Selection | None = None
    """How queries choose among entries; None: they see all."""
