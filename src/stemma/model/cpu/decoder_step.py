"""A step through a fused decoder as one native call.

Decode is bound by reading the weights, each once a step. With one call for each product, threads start and
join about two hundred times a step. Here they stay together from the first layer to the logits
(decoder_step.h), at every instruction-set level, in bfloat16 and float32. Prompts gain as well: threads wait
less.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cpu.fused_layer import FusedLayer
from stemma.model.cpu.logits_memory import LogitsMemory
from stemma.model.cpu.low_rank import describe_rows
from stemma.model.cpu.recurrent_layer import StepStates, offsets_of, state_layout_of
from stemma.model.cpu.weights import PackedProduct
from stemma.model.families.layout import ModelLayout
from stemma.native.library import Kernels
from stemma.native.structures import AttendArgs, LatentArgs, LayerWeights, PageArgs, RotateArgs, StepArgs

_ALIGNMENT = 64


class DecoderStep:
    """Runs steps of any number of tokens."""

    def __init__(
        self,
        kernels: Kernels,
        layout: ModelLayout,
        layers: list[FusedLayer],
        final_norm: torch.Tensor,
        head: PackedProduct,
        dtype: torch.dtype,
    ) -> None:
        self._kernels = kernels
        self._fused = layers  # the structures point into them
        self._layers = (LayerWeights * len(layers))(*_described(layers, layout))
        self._layout: KVLayout | None = None
        """Says where the layers' KV lies, as `self._layers` have it."""
        self._is_recurrent = any(layer.recurrent is not None for layer in layout.layers)
        self._final_norm = final_norm
        self._head = head
        self._args = StepArgs(
            layers=ctypes.addressof(self._layers),
            num_layers=len(layers),
            final_norm=final_norm.data_ptr(),
            head=head.strips,
            hidden_dim=head.in_features,
            is_bf16=dtype == torch.bfloat16,
            centered=layout.norm.in_floats,
            residual_scale=layout.residual_scale,
            eps=layout.norm.eps,
        )
        """What no step changes is set once."""
        self._room = torch.empty(0, dtype=torch.uint8)
        self._logits_memory = LogitsMemory()

    def forward(
        self,
        batch: ForwardBatch,
        kv: DeviceKV,
        hidden: torch.Tensor,
        heads: RotateArgs | LatentArgs,
        attend: AttendArgs,
        plan: int,
        states: torch.Tensor | None = None,
        pages: PageArgs | None = None,
    ) -> torch.Tensor:
        """Write the KV of `hidden` [T, H] (the tokens' embeddings; overwritten), return logits [L, vocab].

        The logits are float32, rounded to the model's dtype. `heads` and `attend` are those of layer 0; the
        fields that differ by layer are set in the call. `states` [T, H], if given, get the hidden states
        behind the final norm. `pages`: of a cache that has any.
        """
        self._place(kv.layout)
        logits = self._logits_memory.take(len(batch.logits_rows), self._head.out_features)
        args = self._args
        args.threads = torch.get_num_threads()
        args.rows, args.num_logits = hidden.shape[0], logits.shape[0]
        args.logits_rows = batch.logits_rows.data_ptr()
        args.hidden, args.logits = hidden.data_ptr(), logits.data_ptr()
        args.states = None if states is None else states.data_ptr()
        args.layer_bytes = kv.data.stride(1) * kv.data.element_size()
        args.attend, args.pages = attend, pages or PageArgs()
        images = batch.images
        args.feature_layers = 0
        if images is not None and images.features is not None:
            assert images.features.is_contiguous()
            args.feature_layers, args.num_features = images.features.shape[:2]
            args.features, args.feature_rows = images.features.data_ptr(), images.rows.data_ptr()
        adapters = describe_rows(batch.adapters) if batch.adapters else None
        args.adapters = None if adapters is None else ctypes.addressof(adapters)
        args.num_adapters = len(batch.adapters)
        states_of_rows = StepStates(batch, kv) if self._is_recurrent else None
        if states_of_rows is not None:
            args.state_rows = states_of_rows.rows
        if isinstance(heads, RotateArgs):
            args.rotate = heads
        else:
            args.latent = heads
        at = ctypes.addressof(args)
        num_bytes = self._kernels.decoder_step_room(at) + _ALIGNMENT
        if num_bytes > self._room.numel():
            self._room = torch.empty(num_bytes, dtype=torch.uint8)
        args.room = -(-self._room.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        batch.on_launch()
        self._kernels.decoder_step(plan, at)
        return logits

    def _place(self, layout: KVLayout) -> None:
        """Tell each layer where its KV lies."""
        if layout is self._layout:
            return
        self._layout, kv_layer = layout, 0
        for described, fused in zip(self._layers, self._fused, strict=True):
            described.in_pages, described.kv_layer = layout.place_of(kv_layer)
            kv_layer += fused.recurrent is None


def _described(layers: list[FusedLayer], layout: ModelLayout) -> Iterator[LayerWeights]:
    """Yield each layer's weights."""
    states = state_layout_of(layout)
    for number, (fused, layer) in enumerate(zip(layers, layout.layers, strict=True)):
        offsets = (0, 0) if layer.recurrent is None else offsets_of(states, number)
        yield fused.weights(layer, offsets)
