"""A step through a fused decoder as one native call.

Decode is bound by reading the weights, each once a step. Called product by product, oneDNN reads them at two
thirds of what memory gives: some two hundred times a step, threads are sent off and waited for. Here the
threads stay together from the first layer to the logits (decoder_step.h), and weights are read in the order
in which oneDNN packed them (strips.h), so they are not kept twice. Prompts gain as well: nobody waits.
"""

from __future__ import annotations

import ctypes
import math
from typing import TypeGuard

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.batch import ForwardBatch
from stemma.model.cpu.fused_layer import FusedLayer
from stemma.model.cpu.weights import LinearFunction, PackedProduct
from stemma.native.library import AttendArgs, Kernels, LayerWeights, RotateArgs, StepArgs, Strips

AMX_ROWS = 32
"""With more tokens products are bound by arithmetic, and on processors with tiles oneDNN's are faster."""


class DecoderStep:
    """Runs steps of up to `max_rows` tokens. Holds addresses only: `layers` must stay."""

    def __init__(
        self,
        kernels: Kernels,
        layers: list[FusedLayer],
        final_norm: torch.Tensor,
        head: PackedProduct,
        eps: float,
    ) -> None:
        self._kernels = kernels
        self._layers = (LayerWeights * len(layers))(*(_layer_weights(layer) for layer in layers))
        self._final_norm = final_norm
        self._head = head
        self._eps = eps
        self._room = torch.empty(0, dtype=torch.uint8)
        self.max_rows: float = AMX_ROWS if kernels.has_amx else math.inf

    def forward(
        self,
        batch: ForwardBatch,
        kv: DeviceKV,
        hidden: torch.Tensor,
        rotate: RotateArgs,
        attend: AttendArgs,
        plan: int,
    ) -> torch.Tensor:
        """Write the KV of `hidden` [T, H] (the tokens' embeddings; overwritten), return logits [L, vocab].

        `rotate` and `attend` are those of layer 0; what differs by layer is set here.
        """
        logits = hidden.new_empty(len(batch.logits_rows), self._head.out_features)
        args = StepArgs(
            layers=ctypes.addressof(self._layers),
            num_layers=len(self._layers),
            threads=torch.get_num_threads(),
            final_norm=self._final_norm.data_ptr(),
            head=strips_of(self._head),
            rows=hidden.shape[0],
            num_logits=logits.shape[0],
            logits_rows=batch.logits_rows.data_ptr(),
            hidden_dim=hidden.shape[1],
            hidden=hidden.data_ptr(),
            logits=logits.data_ptr(),
            layer_bytes=kv.data.stride(1) * kv.data.element_size(),
            rotate=rotate,
            attend=attend,
            eps=self._eps,
        )
        at = ctypes.addressof(args)
        num_bytes = self._kernels.decoder_step_room(at)
        if num_bytes > self._room.numel():
            self._room = torch.empty(num_bytes, dtype=torch.uint8)
        args.room = self._room.data_ptr()
        self._kernels.decoder_step(plan, at)
        return logits


def make_decoder_step(
    kernels: Kernels,
    layers: list[FusedLayer],
    final_norm: torch.Tensor,
    head: LinearFunction,
    eps: float,
) -> DecoderStep | None:
    """Return the one call if processor, weights and shapes allow it."""
    if not kernels.has_bf16_dot or not _in_strips(head):
        return None
    for layer in layers:
        if not all(_in_strips(product) for product in (layer.qkv, layer.output, layer.gate_up)):
            return None
        if not _in_strips(layer.down) or layer.down.in_features % 16:  # gates and ups pair up by 16
            return None
    return DecoderStep(kernels, layers, final_norm, head, eps)


class PackedEmbedding:
    """An embedding read out of the packed output head that it is tied to: ids [T] -> [T, H] bf16."""

    def __init__(self, kernels: Kernels, head: PackedProduct) -> None:
        assert kernels.has_bf16_dot
        assert head.strips is not None
        self._kernels = kernels
        self._head = head

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look `token_ids` (int64, contiguous) up."""
        rows = torch.empty(len(token_ids), self._head.in_features, dtype=torch.bfloat16)
        strips = strips_of(self._head)
        self._kernels.take_rows(
            ctypes.addressof(strips),
            token_ids.data_ptr(),
            len(token_ids),
            rows.data_ptr(),
            torch.get_num_threads(),
        )
        return rows


def strips_of(product: PackedProduct) -> Strips:
    """Describe a weight that lies in strips."""
    bias = None if product.bias is None else product.bias.data_ptr()
    return Strips(product.strips, bias, product.out_features, product.in_features)


def _in_strips(function: LinearFunction | None) -> TypeGuard[PackedProduct]:
    return isinstance(function, PackedProduct) and function.strips is not None


def _layer_weights(layer: FusedLayer) -> LayerWeights:
    products = (layer.qkv, layer.output, layer.gate_up, layer.down)
    norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
    return LayerWeights(
        *(strips_of(product) for product in products if _in_strips(product)),
        *(None if norm is None else norm.data_ptr() for norm in norms),
        window=layer.sliding_window,
        scale=layer.scaling,
    )
