"""Blocks of bf16 KV in two thirds of their bytes, equal to the bit (native/kv_codec.h).

Stores of the tiers below the device keep a block packed where that makes it shorter, and as it is where it
doesn't; whoever puts and gets blocks sees whole ones. What is shorter than a block is packed. It says itself
how it was packed, so it is read whatever the settings are now. Little-endian::

    4 bytes   magic "SKV1"
    u32       numbers from one token to the next (the channels), u32: tokens of a segment
    u32       bytes of the whole block
    u64       XXH3-64 of the whole block: what comes out is checked too
    segments
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import numpy.typing as npt
import xxhash

from stemma.config.settings import EngineSettings
from stemma.memory.device.layout import KVLayout
from stemma.native.library import Kernels, load_kernels

_HEAD = struct.Struct("<4sIIIQ")
_MAGIC = b"SKV1"
_LEAST_BYTES = 65536
"""Smaller blocks are kept as they are: on disk and in memory a block takes whole pages."""
NUM_THREADS = 8
"""Threads that may pack or unpack: loads and their helpers, writers, the host tier's own, the pool's."""
_scratch = threading.local()


class BlockCodec:
    """Packs the blocks of one layout. Any thread; the GIL isn't held meanwhile."""

    def __init__(self, kernels: Kernels, layout: KVLayout) -> None:
        self._kernels = kernels
        width = layout.row_bytes // 2
        self._period = layout.piece_bytes // 2 if layout.tiled else width
        self._rows = layout.block_size
        self.block_bytes = layout.block_bytes
        self._room = _HEAD.size + int(kernels.kv_room(layout.block_bytes, self._period, self._rows))

    @property
    def reserved_bytes(self) -> int:
        """Upper limit of the memory that all threads use meanwhile."""
        return NUM_THREADS * self._room

    def pack(self, block: memoryview) -> memoryview | None:
        """Return a block packed, valid until this thread packs or unpacks again; None: it stays as it is."""
        raw, target = np.frombuffer(block, np.uint8), _room(self._room)
        size = self._kernels.pack_kv(
            raw.ctypes.data, raw.nbytes, self._period, self._rows, target.ctypes.data + _HEAD.size
        )
        if size == 0 or _HEAD.size + size >= raw.nbytes:
            return None
        _HEAD.pack_into(
            target.data, 0, _MAGIC, self._period, self._rows, raw.nbytes, xxhash.xxh3_64_intdigest(block)
        )
        return target[: _HEAD.size + size].data


def choose_codec(settings: EngineSettings, layout: KVLayout, device_type: str) -> BlockCodec | None:
    """Return what packs blocks for the tiers below the device; None: nothing does.

    On a GPU a core would unpack more slowly than the bus copies. Several ranks evict the same blocks only
    where these take the same room.
    """
    chosen = settings.tiers.tier_compression
    is_wanted = chosen == "on" or (chosen == "auto" and device_type == "cpu")
    return make_codec(layout, settings.model.isa) if is_wanted and settings.parallel.num_ranks == 1 else None


def make_codec(layout: KVLayout, isa: str = "auto") -> BlockCodec | None:
    """Return the codec of a layout; None where it gains nothing, or there are no kernels.

    By their bytes' entropy int8 codes keep 81 %, fp8 76, floats of 32 bits 82 (`benchmarks.packed_kv --kv`).
    """
    is_plain = layout.stored == "plain" and layout.dtype == "bfloat16"
    kernels = load_kernels(isa) if is_plain and layout.block_bytes >= _LEAST_BYTES else None
    return None if kernels is None else BlockCodec(kernels, layout)


def unpack(packed: memoryview, into: memoryview) -> bool:
    """Unpack what `BlockCodec.pack` returned; False, with undefined bytes in `into`, if it can't be that."""
    kernels = load_kernels()
    if kernels is None or packed.nbytes < _HEAD.size:
        return False
    magic, period, rows, num_bytes, check = _HEAD.unpack_from(packed)
    if magic != _MAGIC or num_bytes != into.nbytes or num_bytes % 2 or not 0 < 2 * period * rows <= num_bytes:
        return False
    source, target = np.frombuffer(packed, np.uint8), np.frombuffer(into, np.uint8)
    size = packed.nbytes - _HEAD.size
    is_whole = kernels.unpack_kv(
        source.ctypes.data + _HEAD.size, size, period, rows, target.ctypes.data, num_bytes
    )
    return bool(is_whole) and xxhash.xxh3_64_intdigest(into) == check


def expand(buffer: memoryview, length: int) -> bool:
    """Unpack the first `length` bytes of a buffer into all of it; see `unpack`."""
    packed = _room(buffer.nbytes)[:length]
    np.copyto(packed, np.frombuffer(buffer[:length], np.uint8))
    return unpack(packed.data, buffer)


def _room(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory of this thread, which it uses again."""
    held: npt.NDArray[np.uint8] | None = getattr(_scratch, "bytes", None)
    if held is None or held.nbytes < num_bytes:
        held = _scratch.bytes = np.empty(num_bytes, np.uint8)
    return held
