"""A fused decoder as what is recorded: its layers, over a list in device memory, and its head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from stemma.model.attend.batch import ForwardBatch
from stemma.model.cpu.low_rank import adaptable
from stemma.model.cuda.fused import LayoutDecoder
from stemma.model.cuda.graphs import CudaGraphRecorder
from stemma.model.cuda.layers import LayerStep
from stemma.model.cuda.listed_attention import ListedAttentionStep, PieceRoom
from stemma.model.cuda.low_rank import AdapterStep, AdapterTiles, DeviceAdapter
from stemma.model.cuda.recorded_steps import RecordedDecoder
from stemma.model.families.layout import ModelLayout
from stemma.model.lora.adapter import Adapter, AdapterRows, LinearShape
from stemma.model.weights.named import NamedWeights


class FusedModel:
    """A layout's layers and head."""

    def __init__(self, decoder: LayoutDecoder, device: torch.device) -> None:
        self._decoder, self._device = decoder, device
        self._tiles = AdapterTiles(device)
        self.head = decoder.head

    def states(self, batch: ForwardBatch, step: ListedAttentionStep) -> torch.Tensor:
        """Write the batch's KV; return the hidden states [T, H] behind the final norm."""
        return self._decoder.states(batch, LayerStep(step, step.kv, step.adapters, step.states))

    def adapter_step(self, adapters: Sequence[AdapterRows], num_rows: int) -> AdapterStep | None:
        """Return what adapters add in a step of `num_rows` rows; None: there are none."""
        return self._tiles.step(adapters, num_rows)

    def adaptable(self) -> Mapping[str, LinearShape]:
        """Return the linear layers that adapters may add to, by their names in transformers."""
        return adaptable(self._decoder.layout)

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Return the adapter as a step of this decoder uses it."""
        return DeviceAdapter(adapter, self._decoder.layout, self._decoder.dtype, self._device)


def make_fused_decoder(
    layout: ModelLayout,
    weights: NamedWeights,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_positions: int,
    records: bool,
    report: Callable[[float], None],
) -> RecordedDecoder:
    """Bring all weights to the device and return what runs them; `report` gets the share done, 0..1."""
    decoder = LayoutDecoder(layout, weights, dtype, device, max_positions=max_positions, report=report)
    recorder = CudaGraphRecorder() if records else None
    return RecordedDecoder(FusedModel(decoder, device), PieceRoom.on(device), recorder)
