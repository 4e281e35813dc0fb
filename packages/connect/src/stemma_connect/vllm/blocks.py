"""vLLM's KV caches as blocks of bytes: the same blocks that vLLM's scheduler numbers, over all layers.

vLLM keeps one tensor per layer. One of our blocks is the concatenation of the layers' parts of one vLLM
block, layers in the order of the names that vLLM gives them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from typing_extensions import override

from stemma.errors import ConfigError
from stemma.memory.device.accelerator import accelerator_of
from stemma.memory.device.copy import BlockCopy
from stemma.native.copying import Numbers, copy_runs_function

_PARALLEL_BYTES = 4 * 2**20
"""Size from which a second thread is worth waking: one core doesn't reach the memory's bandwidth."""


class VllmBlocks(BlockCopy):
    """The `BlockCopy` over vLLM's tensors. On CPU a copy is one native call for all layers and blocks.

    A memcpy per layer and block from Python takes twice as long: each is some 64 kB (docs/project/log.md).
    CUDA has never run.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """`caches`: by layer, [num_blocks, ...]; a block must be one dense run of bytes in each.

        Raises ConfigError if it isn't.
        """
        if not caches:
            raise ConfigError("this model keeps no KV that could be saved")
        self._parts: list[torch.Tensor] = []
        """Per layer uint8 [num_blocks, bytes of a block in this layer]."""
        described = []
        for name, cache in caches.items():
            if not isinstance(cache, torch.Tensor) or cache.shape[0] != num_blocks:
                shape = list(cache.shape) if isinstance(cache, torch.Tensor) else type(cache).__name__
                raise ConfigError(
                    f"layer {name} keeps {shape}, not one tensor of {num_blocks} blocks; "
                    "StemmaConnector can't save this model's cache"
                )
            self._parts.append(_dense_rows(name, cache))
            described.append((str(cache.dtype).removeprefix("torch."), *cache.shape[1:], *cache.stride()[1:]))
        sizes = [part.shape[1] for part in self._parts]
        self._offsets = [0, *itertools.accumulate(sizes)]
        self.block_bytes = self._offsets[-1]
        self.num_blocks = num_blocks
        self._accelerator = accelerator_of(self._parts[0].device)
        self.pins_memory = self._accelerator.pins_memory
        self._copy_runs = copy_runs_function()
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="stemma-copy")
        self._starts = np.array([part.data_ptr() for part in self._parts], np.int64)
        self._strides = np.array([part.stride(0) for part in self._parts], np.int64)
        self._sizes = np.array(sizes, np.int64)
        self._stream = self._accelerator.stream()
        runs = [(len(list(group)), shape) for shape, group in itertools.groupby(described)]
        self.layout = "; ".join(f"{count} x {' '.join(map(str, shape))}" for count, shape in runs)
        """A text that differs between any two layouts whose bytes aren't interchangeable: per run of equal
        layers dtype, shape and strides of a block."""

    @override
    def out(self, block_ids: Sequence[int], into: Sequence[torch.Tensor]) -> None:
        if self._stream is None:
            here, there, sizes = self._runs(block_ids, into)
            self._copy_runs(there, here, sizes)
            return
        # The step that wrote the blocks was launched on vLLM's stream and may still run.
        self._stream.wait_event(self._accelerator.marked())
        with self._accelerator.queued_in(self._stream):
            for block_id, target in zip(block_ids, into, strict=True):
                for device_part, start in zip(self._parts, self._offsets, strict=False):
                    row = device_part[block_id]
                    target[start : start + len(row)].copy_(row, non_blocking=True)
        self._stream.synchronize()

    @override
    def into(
        self, block_ids: Sequence[int], sources: Sequence[torch.Tensor], *, beside_reads: bool = False
    ) -> None:
        if self._accelerator.is_host:
            here, there, sizes = self._runs(block_ids, sources)
            is_much = len(block_ids) * self.block_bytes >= _PARALLEL_BYTES and (os.cpu_count() or 1) > 1
            half = 0 if beside_reads or not is_much else len(here) // 2
            helped = None
            if half:
                helped = self._helper.submit(self._copy_runs, here[:half], there[:half], sizes[:half])
            self._copy_runs(here[half:], there[half:], sizes[half:])
            if helped is not None:
                helped.result()
            return
        upload = self._accelerator.stream()
        with self._accelerator.queued_in(upload):
            for block_id, source in zip(block_ids, sources, strict=True):
                for device_part, start in zip(self._parts, self._offsets, strict=False):
                    row = device_part[block_id]
                    row.copy_(source[start : start + len(row)], non_blocking=True)
        upload.synchronize()

    def _runs(
        self, block_ids: Sequence[int], buffers: Sequence[torch.Tensor]
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Return addresses of the blocks' parts, of their places in the buffers, and their lengths."""
        for block_id, buffer in zip(block_ids, buffers, strict=True):
            assert 0 <= block_id < self.num_blocks
            assert buffer.is_contiguous()
            assert buffer.nbytes == self.block_bytes
        ids = np.asarray(block_ids, np.int64)[:, None]
        first = np.array([buffer.data_ptr() for buffer in buffers], np.int64)[:, None]
        here = self._starts + ids * self._strides
        there = first + np.asarray(self._offsets[:-1], np.int64)
        return here.ravel(), there.ravel(), np.tile(self._sizes, len(block_ids))


def _dense_rows(name: str, cache: torch.Tensor) -> torch.Tensor:
    """Return [num_blocks, bytes] over the same memory; raise ConfigError if a block has gaps."""
    block = cache[0]
    last = sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True))
    if last + 1 != block.numel() or cache.stride(0) < block.numel():
        raise ConfigError(
            f"layer {name}: a block of shape {list(block.shape)} and strides {list(block.stride())} is not "
            "one run of bytes; StemmaConnector can't save this layout"
        )
    rows = cache.as_strided((cache.shape[0], block.numel()), (cache.stride(0), 1))
    return rows.view(torch.uint8)
