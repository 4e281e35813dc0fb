"""Decoders of a family's layout on a device: some nine launches a layer, and bits that no batch changes.

It takes the layout and named weights that `cpu/fused.py` takes, so each family with a layout comes at once.
Nothing here waits for the device or depends on numbers that only it knows: a step can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stemma.model.attend.batch import ForwardBatch, ImageRows
from stemma.model.cpu.recurrent_layer import state_layout_of
from stemma.model.cuda.latent import LatentAttention
from stemma.model.cuda.layers import (
    Attention,
    GatedMLP,
    HeadAttention,
    LayerStep,
    OnDevice,
    RowNorm,
    angle_table,
)
from stemma.model.cuda.low_rank import OUTPUT
from stemma.model.cuda.mixture import ExpertMLP
from stemma.model.cuda.products import Weight
from stemma.model.cuda.recurrent import RecurrentLayer
from stemma.model.families import layout
from stemma.model.weights.named import NamedWeights

ORDER = 1
"""Number of the order of sums; raised where it changes, so that no KV of another is taken for this one's."""


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One layer."""

    input_norm: RowNorm
    attention: Attention
    output: Weight
    out_norms: tuple[RowNorm | None, RowNorm | None]
    post_norm: RowNorm
    mlp: GatedMLP | ExpertMLP


class LayoutDecoder:
    """Runs the layers of a layout over what a step attends with."""

    def __init__(
        self,
        model: layout.ModelLayout,
        weights: NamedWeights,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_positions: int,
        report: Callable[[float], None] = lambda _share: None,
    ) -> None:
        """Bring all weights to the device; `report` gets the share done, 0..1."""
        self.layout, load = model, OnDevice(weights, dtype, device)
        angles = angle_table(model.angles, max_positions, dtype, device)
        local = angles
        if model.local_angles is not None:
            local = angle_table(model.local_angles, max_positions, dtype, device)
        self.dtype = dtype
        self._layers: list[DeviceLayer] = []
        kv_number, states = 0, state_layout_of(model)
        for number, layer in enumerate(model.layers):
            report(number / len(model.layers))
            attention: Attention
            if layer.recurrent is not None:
                attention = RecurrentLayer(number, layer, states, load)
            else:
                of_layer = local if layer.is_local else angles
                attention = _attention((number, kv_number), layer, model.heads, of_layer, load)
                kv_number += 1
            self._layers.append(_device_layer(number, layer, attention, load))
        self._norm = load.norm(model.norm)
        self._embedding = load.tensor(model.embedding.weight)
        head, bias = load.linears(model.head or model.embedding)
        is_shared = model.head is None and isinstance(head, torch.Tensor)
        self._head = Weight(self._embedding if is_shared else head, bias)
        self._embedding_scale = model.embedding_scale
        if model.rounds_embedding_scale:
            self._embedding_scale = torch.tensor(model.embedding_scale, dtype=dtype).item()

    def states(self, batch: ForwardBatch, step: LayerStep) -> torch.Tensor:
        """Write the batch's KV; return the states [T, H] behind the last norm."""
        images = None if batch.images is None else batch.images.on(self._embedding.device)
        residual, delta, delta_norm = self._embed(batch, images), None, None
        scale, positions = self.layout.residual_scale, self._positions(batch)
        for number, layer in enumerate(self._layers):
            normed = layer.input_norm.residual(residual, delta, delta_norm, scale)
            if images is not None and images.add_features(residual, number - 1):
                normed = layer.input_norm.residual(residual, None, None, scale)
            attended = layer.attention(normed, positions, step)
            attended_norm, mlp_norm = layer.out_norms
            output = step.adapted(number, OUTPUT, attended, layer.output(attended))
            normed = layer.post_norm.residual(residual, output, attended_norm, scale)
            delta, delta_norm = layer.mlp(normed, step), mlp_norm
        states = self._norm.residual(residual, delta, delta_norm, scale)
        if images is not None and images.add_features(residual, len(self._layers) - 1):
            states = self._norm.residual(residual, None, None, scale)
        return states

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [L, vocab] of states behind the last norm, [L, H]."""
        if len(states) == 0:
            return states.new_empty(0, self._head.outputs)
        logits, divisor = self._head(states).join(), self.layout.logits_divisor
        return logits if divisor == 1.0 else logits / divisor

    def _embed(self, batch: ForwardBatch, images: ImageRows | None) -> torch.Tensor:
        embedded = self._embedding.index_select(0, batch.token_ids)
        if self._embedding_scale != 1.0:
            embedded = embedded * self._embedding_scale
        return embedded if images is None else embedded.index_copy_(0, images.rows, images.vectors)

    def _positions(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the positions [T], or for angles of three axes [3, T]."""
        if not (isinstance(self.layout.heads, layout.GroupedHeads) and self.layout.heads.axes):
            return batch.positions
        if batch.axes is None:
            return batch.positions.expand(3, -1)
        return batch.axes.to(batch.positions.device, non_blocking=True)


def _attention(
    numbers: tuple[int, int],
    layer: layout.Layer,
    heads: layout.GroupedHeads | layout.LatentHeads,
    angles: torch.Tensor,
    load: OnDevice,
) -> Attention:
    """`numbers`: of the layer, and among those with KV."""
    if isinstance(heads, layout.LatentHeads):
        return LatentAttention(numbers[0], layer, heads, angles, load)
    return HeadAttention(*numbers, layer, heads, angles, load)


def _device_layer(number: int, layer: layout.Layer, attention: Attention, load: OnDevice) -> DeviceLayer:
    attended_norm = mlp_norm = None
    if layer.out_norms is not None:
        attended_norm, mlp_norm = (load.norm(norm) for norm in layer.out_norms)
    mlp: GatedMLP | ExpertMLP
    if isinstance(layer.mlp, layout.Gated):
        mlp = GatedMLP(number, layer.mlp, load)
    else:
        mlp = ExpertMLP(number, layer.mlp, load)
    return DeviceLayer(
        input_norm=load.norm(layer.input_norm),
        attention=attention,
        output=load.product(layer.output),
        out_norms=(attended_norm, mlp_norm),
        post_norm=load.norm(layer.post_norm),
        mlp=mlp,
    )
