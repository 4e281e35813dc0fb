"""Steps of a fused decoder as they come, none recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cuda.fused import LayoutDecoder
from stemma.model.cuda.layers import LayerStep
from stemma.model.cuda.listed_attention import ListedAttentionStep, PieceRoom
from stemma.model.cuda.step_inputs import StepInputs
from stemma.model.families.layout import ModelLayout
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.weights.named import NamedWeights

_FEWEST_ROWS = 256


class FusedSteps:
    """A `Decoder` that runs a layout's layers over a list in device memory."""

    def __init__(self, decoder: LayoutDecoder, room: PieceRoom) -> None:
        """`room`: for pieces of contexts; it knows how many programs there are."""
        self._decoder, self._room = decoder, room
        self._inputs: StepInputs | None = None
        self._max_rows = 0

    def adaptable(self) -> Mapping[str, LinearShape]:
        """Return that no adapter may add to anything."""
        return {}

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Never called: nothing is adaptable."""
        raise AssertionError(f"adapter {adapter.name}")

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the batch's KV and return logits [L, vocab]. Raises RuntimeError for tables without room."""
        num_rows = len(batch.token_ids)
        if self._inputs is None or num_rows > self._max_rows:
            self._max_rows = max(_FEWEST_ROWS, 1 << (num_rows - 1).bit_length())
            self._inputs = StepInputs(self._max_rows, kv.device, self._room.num_programs)
        if not self._inputs.fill(batch, num_rows, kv.layout.block_size):
            raise RuntimeError(f"a step of {num_rows} tokens has more block tables than there is room for")
        step = LayerStep(ListedAttentionStep(self._inputs, kv, self._room), kv)
        return self._decoder.run(batch, step)


def make_fused_decoder(
    layout: ModelLayout,
    weights: NamedWeights,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_positions: int,
    report: Callable[[float], None],
) -> FusedSteps:
    """Bring all weights to the device and return what runs them; `report` gets the share done, 0..1."""
    decoder = LayoutDecoder(layout, weights, dtype, device, max_positions=max_positions, report=report)
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return FusedSteps(decoder, PieceRoom(num_multiprocessors))
