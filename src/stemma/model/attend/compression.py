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
from typing import Any

import torch

from stemma.memory.device.layout import CompressedLayer, CompressedLayout, WindowGroup
from stemma.model.attend.selection import Selection


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


CHOSEN, WHOLE = "compressed_sparse_attention", "heavily_compressed_attention"
"""Names in `layer_types` of layers whose queries choose among entries, and of those whose see all."""


def kept_by(config: Any, layer: int) -> CompressedLayer:
    """Return what a layer of DeepSeek-V4 keeps, by transformers' config."""
    kind, dim, index = config.layer_types[layer], config.head_dim, config.index_head_dim
    if kind not in (CHOSEN, WHOLE):
        return CompressedLayer(dim)
    rate = int(config.compress_rates[kind])
    if kind == WHOLE:
        return CompressedLayer(3 * dim, rate, dim)
    return CompressedLayer(5 * dim + 4 * index, rate, dim + index)


def span_of(config: Any, layer: int) -> int:
    """Return how many tokens an entry of a layer is made of; 0: the layer makes none."""
    kind = config.layer_types[layer]
    rate = int(config.compress_rates[kind]) if kind in (CHOSEN, WHOLE) else 0
    return 2 * rate if kind == CHOSEN else rate


def compressed_layout(config: Any, max_model_len: int) -> tuple[CompressedLayout, WindowGroup]:
    """Return what DeepSeek-V4's layers keep: entries in blocks, and rows in pages, as far back as needed.

    The group has the layer in pages, which is number 1; that in blocks is number 0.
    """
    numbers = range(config.num_hidden_layers)
    layout = CompressedLayout(tuple(kept_by(config, number) for number in numbers))
    needed = max(int(config.sliding_window), *(span_of(config, number) for number in numbers))
    return layout, WindowGroup((1,), min(needed, max_model_len), 1, layout.row_dim)
