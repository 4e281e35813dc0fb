"""Copies device blocks to and from host memory.

On CPU a device block is plain memory: one memcpy, by two threads for large copies (the stores of one core
don't reach the memory's bandwidth). On others the host side is pinned, and copies run on their own streams,
concurrently with steps. Copies *out* need no ordering with kernels: a block is committed, and so copied,
only after the step that wrote it has ended. The caller waits for the copy itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from typing_extensions import override

from stemma.memory.device.accelerator import accelerator_of
from stemma.memory.device.block_codec import BlockCodec
from stemma.memory.device.kv import DeviceKV
from stemma.native.copying import CopyBytes

_PARALLEL_BYTES = 4 * 2**20
_LAST_BYTES = 32 * 2**20
"""What steps may be queued behind: longer, those of others would wait for it."""


class BlockCopy(Protocol):
    """Moves whole blocks between a device and host memory, whoever owns the device's blocks."""

    block_bytes: int
    pins_memory: bool
    """Whether host memory that blocks are copied from and to should be pinned."""
    codec: BlockCodec | None = None
    """Packs blocks for the tiers below; None: they stay as they are."""

    def out(self, block_ids: Sequence[int], into: Sequence[torch.Tensor]) -> None:
        """Copy blocks into host tensors ([block_bytes] uint8 each). Step loop only; done on return."""

    def into(
        self, block_ids: Sequence[int], sources: Sequence[torch.Tensor], *, beside_reads: bool = False
    ) -> None:
        """Copy host tensors into blocks that no step reads yet. Any thread; done on return.

        `beside_reads`: another thread reads the next blocks at the same time, so this copy uses one core.
        """

    def begin(self, block_ids: Sequence[int], sources: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """Copy as `into`, but the last copies may go on: what steps queue from now on runs after them.

        Return what waits for them, until when `sources` must stay as they are; None: all are done.
        """
        self.into(block_ids, sources)
        return None


class DeviceCopy(BlockCopy):
    """The `BlockCopy` of our own `DeviceKV`."""

    def __init__(self, kv: DeviceKV, copy: CopyBytes = np.copyto, codec: BlockCodec | None = None) -> None:
        """`copy` copies on CPU; it should release the GIL."""
        self._kv = kv
        self.codec = codec
        self._copy = copy
        self.block_bytes = kv.layout.block_bytes
        self._accelerator = accelerator_of(kv.device)
        self.pins_memory = self._accelerator.pins_memory
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="stemma-copy")
        self._upload = self._accelerator.stream()
        self._download = self._accelerator.stream()

    @override
    def out(self, block_ids: Sequence[int], into: Sequence[torch.Tensor]) -> None:
        if self._download is None:
            for block_id, target in zip(block_ids, into, strict=True):
                self._copy(target.numpy(), self._kv.block_bytes_view(block_id).numpy())
            return
        with self._accelerator.queued_in(self._download):
            self._kv.uploads.order()
            for block_id, target in zip(block_ids, into, strict=True):
                target.copy_(self._kv.block_bytes_view(block_id), non_blocking=True)
        self._download.synchronize()

    @override
    def into(
        self, block_ids: Sequence[int], sources: Sequence[torch.Tensor], *, beside_reads: bool = False
    ) -> None:
        if self._upload is None:
            if beside_reads:
                self._copy_each(block_ids, sources)
            else:
                self._copy_in(block_ids, sources)
            return
        with self._accelerator.queued_in(self._upload):
            self._queue(block_ids, sources)
            end = self._accelerator.marked()
        end.synchronize()

    @override
    def begin(self, block_ids: Sequence[int], sources: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        if self._upload is None:
            self._copy_in(block_ids, sources)
            return None
        most = max(0, len(block_ids) - max(1, _LAST_BYTES // self.block_bytes))
        with self._accelerator.queued_in(self._upload):
            self._queue(block_ids[:most], sources[:most])
            near = self._accelerator.marked()
            self._queue(block_ids[most:], sources[most:])
            end = self._accelerator.marked()
        near.synchronize()
        self._kv.uploads.add(end)

        def wait() -> None:
            end.synchronize()
            self._kv.uploads.remove(end)

        return wait

    def _queue(self, block_ids: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
        """Queue copies in this thread's stream, one for each run of blocks on both sides."""
        for first, count in _runs(block_ids, sources, self.block_bytes):
            source = sources[first]
            source = source.as_strided((count * self.block_bytes,), (1,)) if count > 1 else source
            self._kv.block_run(block_ids[first], count).copy_(source, non_blocking=True)

    def _copy_in(self, block_ids: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
        half = len(block_ids) // 2
        if len(block_ids) * self.block_bytes < _PARALLEL_BYTES or (os.cpu_count() or 1) < 2:
            half = 0
        helped = self._helper.submit(self._copy_each, block_ids[:half], sources[:half]) if half else None
        self._copy_each(block_ids[half:], sources[half:])
        if helped is not None:
            helped.result()

    def _copy_each(self, block_ids: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
        for block_id, source in zip(block_ids, sources, strict=True):
            self._copy(self._kv.block_bytes_view(block_id).numpy(), source.numpy())


def _runs(
    block_ids: Sequence[int], sources: Sequence[torch.Tensor], block_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of blocks that lie behind each other on the device and in one host memory."""
    first, places = 0, [source.data_ptr() for source in sources]
    for number in range(1, len(block_ids) + 1):
        before = number - 1
        if (
            number < len(block_ids)
            and block_ids[number] == block_ids[before] + 1
            and places[number] == places[before] + block_bytes
            and sources[number].untyped_storage().data_ptr() == sources[first].untyped_storage().data_ptr()
        ):
            continue
        yield first, number - first
        first = number
