"""Steps of any kind recorded, one recording for each bucket of rows.

Decodes, chunks, prefix hits, drafts and mixtures of them differ only in numbers that the kernels read
(`step_inputs.py`), so a step is copied into the rows of the next larger bucket and the bucket's recording is
replayed. Rows behind it are padding: they write no KV and see none. The head isn't recorded: it takes the
rows whose logits are wanted, so padding costs none.

Adapters stand in device memory too. A step with images or anything else that no recording carries runs as it
is, by the same kernels.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cuda.graphs import GraphRecorder, Recording, lacks_memory
from stemma.model.cuda.listed_attention import ListedAttentionStep, PieceRoom
from stemma.model.cuda.low_rank import MOST_ADAPTERS, AdapterStep
from stemma.model.cuda.step_inputs import NUM_NUMBERS, StepInputs
from stemma.model.lora.adapter import Adapter, AdapterRows, LinearShape

logger = logging.getLogger(__name__)

ROW_BUCKETS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    *(384, 512, 768, 1024, 1280, 1536, 2048),
)
"""Numbers of rows that are recorded."""


class RecordedModel(Protocol):
    """A model in two parts, of which the first is recorded."""

    def states(self, batch: ForwardBatch, step: ListedAttentionStep) -> torch.Tensor:
        """Write the batch's KV; return the hidden states [T, H] behind the final norm."""

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [L, vocab] of states [L, H]."""

    def adapter_step(self, adapters: Sequence[AdapterRows], num_rows: int) -> AdapterStep | None:
        """Return what adapters add in a step of `num_rows` rows, padding included; None: there are none."""

    def adaptable(self) -> Mapping[str, LinearShape]:
        """As `Decoder.adaptable`."""

    def prepare_adapter(self, adapter: Adapter) -> object:
        """As `Decoder.prepare_adapter`."""


class RecordedDecoder:
    """Runs steps by replaying recordings."""

    def __init__(self, model: RecordedModel, room: PieceRoom, recorder: GraphRecorder | None) -> None:
        """`recorder`: None: every step runs as it is."""
        self._model, self._room, self._recorder = model, room, recorder
        self._kv: DeviceKV | None = None
        self._inputs: StepInputs | None = None
        self._large_inputs: StepInputs | None = None
        """Of steps that don't fit into the others; made for the largest so far."""
        self._recordings: dict[tuple[int, tuple[int, int] | None], Recording] = {}
        """By bucket, and the form of adapters."""
        self._left_out: set[int] = set()
        """Buckets for whose recording there was no memory."""

    @property
    def recorded(self) -> tuple[int, ...]:
        """Buckets that have a recording, in the order in which they were made."""
        return tuple(bucket for bucket, _ in self._recordings)

    def adaptable(self) -> Mapping[str, LinearShape]:
        """Return the linear layers that adapters may add to, by their names in transformers."""
        return self._model.adaptable()

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Return the adapter as a step of this decoder uses it."""
        return self._model.prepare_adapter(adapter)

    @torch.inference_mode()
    def warm_up(self, kv: DeviceKV, progress: Callable[[float], None]) -> None:
        """Compile all kernels and record all buckets, the largest first; `progress` gets the share done.

        The steps are padding alone. Memory for the recordings is taken here.
        """
        inputs, nothing = self._inputs_for(kv), _no_rows(kv.device)
        for done, bucket in enumerate(reversed(ROW_BUCKETS)):
            progress(done / len(ROW_BUCKETS))
            if inputs.fill(nothing, bucket, kv):
                self._states(bucket, inputs, kv, None)
        progress(1.0)

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the batch's KV and return logits [L, vocab]."""
        inputs, bucket = self._inputs_for(kv), self._bucket(batch)
        if bucket is not None and inputs.fill(batch, bucket, kv):
            adapters = self._model.adapter_step(batch.adapters, bucket)
            states = self._states(bucket, inputs, kv, adapters)[: len(batch.token_ids)]
        else:
            states = self._as_it_is(batch, inputs, kv)
        if batch.wants_hidden:
            batch.hidden = states.clone()  # the next step overwrites what was recorded
        return self._model.head(states.index_select(0, batch.logits_rows))

    def _bucket(self, batch: ForwardBatch) -> int | None:
        """Return the bucket of a step that a recording can serve; None for any other."""
        num_rows = len(batch.token_ids)
        if self._recorder is None or not 0 < num_rows <= ROW_BUCKETS[-1]:
            return None
        if len(batch.adapters) > MOST_ADAPTERS:
            return None
        others = (batch.written_rows, batch.pages, batch.images, batch.limits)
        if any(other is not None for other in others):
            return None
        bucket = ROW_BUCKETS[bisect_left(ROW_BUCKETS, num_rows)]
        return None if bucket in self._left_out else bucket

    def _inputs_for(self, kv: DeviceKV) -> StepInputs:
        """Return the inputs. Recordings hold addresses of `kv`, so another `kv` drops them."""
        if self._inputs is None or self._kv is not kv:
            self._kv, self._large_inputs = kv, None
            self._inputs = StepInputs(ROW_BUCKETS[-1], kv.device, self._room.num_programs)
            self._recordings.clear()
        return self._inputs

    def _as_it_is(self, batch: ForwardBatch, inputs: StepInputs, kv: DeviceKV) -> torch.Tensor:
        batch.on_launch()
        adapters = self._model.adapter_step(batch.adapters, len(batch.token_ids))
        filled = self._filled(batch, inputs, kv)
        return self._model.states(batch, ListedAttentionStep(filled, kv, self._room, adapters))

    def _filled(self, batch: ForwardBatch, inputs: StepInputs, kv: DeviceKV) -> StepInputs:
        """Return inputs that hold a step as it is; larger ones are made where it doesn't fit."""
        num_rows, size = len(batch.token_ids), NUM_NUMBERS
        for one in (inputs, self._large_inputs):
            if one is not None and num_rows <= one.max_rows and one.fill(batch, num_rows, kv):
                return one
        self._large_inputs = None
        while True:
            size *= 2
            large = StepInputs(max(num_rows, inputs.max_rows), kv.device, self._room.num_programs, size)
            if large.fill(batch, num_rows, kv):
                self._large_inputs = large
                return large

    def _states(
        self, bucket: int, inputs: StepInputs, kv: DeviceKV, adapters: AdapterStep | None
    ) -> torch.Tensor:
        """Replay a bucket's recording; the first time, run the step and record it for the next time."""
        key = bucket, None if adapters is None else adapters.form
        if (recording := self._recordings.get(key)) is not None:
            return recording.replay()
        batch, step = inputs.batch(bucket), ListedAttentionStep(inputs, kv, self._room, adapters)
        states = self._model.states(batch, step)
        if self._recorder is None or bucket in self._left_out:
            return states
        try:
            replay = self._recorder.record(lambda: self._model.states(batch, step))
        except RuntimeError as error:
            if lacks_memory(error):
                self._left_out.add(bucket)
                logger.warning("no memory to record steps of %d rows, which run as they are", bucket)
                return states
            self._recorder = None
            self._recordings.clear()
            logger.warning("steps of this model can't be recorded: %s", error)
        else:
            self._recordings[key] = Recording(replay, step)
        return states


def _no_rows(device: torch.device) -> ForwardBatch:
    """Return a step of no tokens."""
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    return ForwardBatch(empty, empty, empty, [0], [], torch.zeros(0, 0, dtype=torch.int32), empty)
