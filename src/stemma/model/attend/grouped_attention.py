"""A step over KV in two groups: layers that see all tokens, in blocks, and layers with windows, in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.model.attend.attention import AttentionCall, StepContext
from stemma.model.attend.batch import ForwardBatch

MakeStep = Callable[[ForwardBatch, DeviceKV], AbstractContextManager[StepContext]]


class GroupedStep:
    """`StepContext` that hands each layer to the step over its group."""

    def __init__(self, layout: KVLayout, in_blocks: StepContext, in_pages: StepContext) -> None:
        self._layout, self._in_blocks, self._in_pages = layout, in_blocks, in_pages

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend in the step of the layer's group."""
        is_paged, number = self._layout.place_of(call.layer_idx)
        step = self._in_pages if is_paged else self._in_blocks
        return step.attend(replace(call, layer_idx=number), query, key, value)


@contextmanager
def step_over(batch: ForwardBatch, kv: DeviceKV, make: MakeStep) -> Iterator[StepContext]:
    """Give the context of a step over all groups that `kv` has; `make` gives that over one."""
    if batch.pages is None:
        with make(batch, kv) as step:
            yield step
        return
    assert kv.pages is not None
    with make(batch, kv) as in_blocks, make(batch.in_pages(), kv.pages) as in_pages:
        yield GroupedStep(kv.layout, in_blocks, in_pages)
