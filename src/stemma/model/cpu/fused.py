"""Decoders as one native call a step on CPU, of the families whose layout the registry has.

Run through its modules, a layer of transformers takes some fifty torch calls, which at batch 1 cost as much
as a fifth of a 0.5B model's weights. Here torch looks up embeddings and rotary angles, and everything else is
one call (decoder_step.py). Tests hold each family against plain transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.attention import StepContext
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.model.cpu.codes import can_pack_codes
from stemma.model.cpu.decoder_step import DecoderStep
from stemma.model.cpu.fused_layer import FusedLayer, fuse
from stemma.model.cpu.heads import heads_of
from stemma.model.cpu.low_rank import PackedAdapter, adaptable
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weights import PackedProduct
from stemma.model.families.layout import ModelLayout
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.weights.named import NamedWeights
from stemma.native.structures import PageArgs

EmbeddingFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""ids [T] -> [T, H]."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """All weights of a model, as the decoder reads them."""

    layers: list[FusedLayer]
    embed: EmbeddingFunction
    head: PackedProduct
    norm: torch.Tensor
    """[H]: the last norm's."""
    saved_bytes: int
    """Memory that they take less than plain ones."""


def pack_weights(
    layout: ModelLayout, weights: NamedWeights, packing: Packing, report: Callable[[float], None]
) -> PackedWeights:
    """Pack a model; `report` gets the share done, 0..1."""
    layers: list[FusedLayer] = []
    for index, layer in enumerate(layout.layers):
        report(index / len(layout.layers))
        layers.append(fuse(layer, layout.heads, weights, packing))
    embed, head = _pack_ends(layout, weights, packing)
    return PackedWeights(layers, embed, head, weights.norm(layout.norm), packing.saved_bytes)


def _pack_ends(
    layout: ModelLayout, weights: NamedWeights, packing: Packing
) -> tuple[EmbeddingFunction, PackedProduct]:
    """Return the embedding, ids [T] -> [T, H], and the output head.

    Where they are tied, the one packed weight serves both: rows are read out of it. Rows of codes are too.
    """
    if layout.head is None:
        packed = packing.head(weights.affine(layout.embedding))
        return packed.take_rows, packed
    head = packing.head(weights.affine(layout.head))
    codes = weights.codes(layout.embedding.weight)
    if codes is not None and can_pack_codes(codes):
        return packing.product([codes]).take_rows, head
    return partial(torch.index_select, weights.own(layout.embedding.weight), 0), head


class FusedDecoder:
    """Runs all layers of a model over paged KV."""

    def __init__(
        self, layout: ModelLayout, packed: PackedWeights, packing: Packing, dtype: torch.dtype
    ) -> None:
        """Take a model's weights, packed by `packing` or one like it."""
        self._kernels = kernels = packing.kernels
        self._heads = heads_of(layout, dtype)
        self._embed, self._head = packed.embed, packed.head
        self._step = DecoderStep(kernels, layout, packed.layers, packed.norm, packed.head, dtype)
        self._layout, self._dtype = layout, dtype
        self._embedding_scale, self._logits_divisor = layout.embedding_scale, layout.logits_divisor
        if layout.rounds_embedding_scale:
            self._embedding_scale = torch.tensor(layout.embedding_scale, dtype=dtype).item()
        self._adaptable = adaptable(layout)

    def adaptable(self) -> dict[str, LinearShape]:
        """Return the linear layers that adapters may add to, by their names in transformers."""
        return self._adaptable

    def prepare_adapter(self, adapter: Adapter) -> PackedAdapter:
        """Return the adapter as a step of this decoder uses it."""
        return PackedAdapter(self._kernels, adapter, self._layout, self._dtype)

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the batch's KV and return the logits of its `logits_rows`, [L, vocab] float32."""
        with NativeAttentionStep(batch, kv, self._kernels) as step:
            if not batch.wants_hidden:
                return self._run(batch, step)
            logits, batch.hidden = self.run_with_states(batch, step, kv)
            return logits

    def run_with_states(
        self, batch: ForwardBatch, step: StepContext, _kv: DeviceKV
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the batch's KV; return logits [L, vocab] and all rows' states [T, H] behind the last norm."""
        assert isinstance(step, NativeAttentionStep)
        states = torch.empty(len(batch.token_ids), self._head.in_features, dtype=self._dtype)
        return self._run(batch, step, states), states

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [T, H] of ids [T]."""
        embedded = self._embed(token_ids)
        return embedded if self._embedding_scale == 1.0 else embedded * self._embedding_scale

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [T, vocab] of hidden states [T, H] behind the final norm."""
        return self._head(states)

    def _run(
        self, batch: ForwardBatch, step: NativeAttentionStep, states: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.embed(batch.token_ids)
        if batch.images is not None:
            hidden.index_copy_(0, batch.images.rows, batch.images.vectors)
        heads, attend = self._heads.of_step(batch, step.kv)
        with self._pages(batch, step.kv) as pages:
            logits = self._step.forward(
                batch, step.kv, hidden, heads, attend, self._plan(step), states, pages
            )
        return logits if self._logits_divisor == 1.0 else logits / self._logits_divisor

    def _plan(self, step: NativeAttentionStep) -> int:
        return step.plan(self._heads.num_kv_heads, self._heads.group_size).open(self._kernels)

    @contextmanager
    def _pages(self, batch: ForwardBatch, kv: DeviceKV) -> Iterator[PageArgs | None]:
        """Give what a step over pages takes beside blocks; None: all KV lies in blocks."""
        if kv.pages is None:
            yield None
            return
        paged = batch.in_pages()
        with NativeAttentionStep(paged, kv.pages, self._kernels) as step:
            yield PageArgs(
                keys=kv.pages.address(0, 0),
                values=kv.pages.address(0, 1),
                slots=paged.slots.data_ptr(),
                block_stride=kv.pages.block_stride,
                plan=self._plan(step),
            )
