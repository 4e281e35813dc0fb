"""The 128 bytes that describe one block on disk.

A record is stored in the index file at ``128 * slot``, and again directly before the block in its slab. A
restart reads the index; the copies rebuild a damaged index. Little-endian:

====== ===== ==========================================================
offset bytes field
====== ===== ==========================================================
0      4     magic ``STB1``
4      2     format version
6      1     priority, 0..100
7      1     zero
8      32    block key
40     32    parent's key
72     8     generation: grows with every write to the directory
80     8     checksum of the block's bytes, bound to key and generation
88     4     length of the block in bytes as it is stored: packed or not
92     4     `session_number` of the conversation that left it, 0: none
96     8     whose it is: `owner_tag` as a number, 0: nobody's
104    8     time of last use, seconds since 1970 (float64)
112    4     time to live after last use, seconds (float32, NaN: default)
116    4     slot
120    8     XXH3-64 of the 120 bytes before
====== ===== ==========================================================

A record never crosses a disk sector. The block's checksum is seeded with key and generation, so the bytes of
an older block in the same slot, whole or half overwritten, never pass as the new block.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import xxhash

from stemma.types import NO_HINT, BlockKey, RetentionHint

RECORD_BYTES = 128
MAX_BLOCK_BYTES = (1 << 32) - 1
DISK_FORMAT_VERSION = 2
"""1 had a time of writing where 2 has the owner. Before there were sessions the length had 8 bytes: to such a
version a block with a session is a free slot."""
_MAGIC = b"STB1"
_FIELDS = struct.Struct("<4sHBx32s32sQQIIQdfI")
_CHECK = struct.Struct("<Q")
_CHECKED = struct.Struct("120s8x")

RECORD_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("priority", "u1"),
        ("zero", "u1"),
        ("key", "V32"),
        ("parent", "V32"),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("length", "<u4"),
        ("session", "<u4"),
        ("owner", "<u8"),
        ("used_at", "<f8"),
        ("ttl_s", "<f4"),
        ("slot", "<u4"),
        ("check", "<u8"),
    ]
)
assert RECORD_DTYPE.itemsize == RECORD_BYTES == _FIELDS.size + _CHECK.size


@dataclass(frozen=True, slots=True)
class Record:
    """One block on disk."""

    slot: int
    key: BlockKey
    parent: BlockKey
    generation: int
    checksum: int
    length: int
    owner: str
    used_at: float
    hint: RetentionHint = NO_HINT
    session: int = 0

    def pack(self) -> bytes:
        """Return the 128 bytes."""
        fields = _FIELDS.pack(
            _MAGIC,
            DISK_FORMAT_VERSION,
            self.hint.priority,
            self.key,
            self.parent,
            self.generation,
            self.checksum,
            self.length,
            self.session,
            int(self.owner or "0", 16),
            self.used_at,
            math.nan if self.hint.ttl_s is None else self.hint.ttl_s,
            self.slot,
        )
        return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def owners_in(records: npt.NDArray[np.void]) -> list[str]:
    """Return the `owner_tag` of each record; equal ones are one object."""
    tags: dict[int, str] = {0: ""}
    return [tags.setdefault(n, f"{n:016x}") for n in records["owner"].tolist()]


def hints_in(records: npt.NDArray[np.void]) -> list[RetentionHint]:
    """Return the hint of each record; equal ones are one object."""
    met: dict[tuple[int, float | None], RetentionHint] = {(NO_HINT.priority, NO_HINT.ttl_s): NO_HINT}
    ttls_s = [None if math.isnan(ttl_s) else ttl_s for ttl_s in records["ttl_s"].tolist()]
    pairs = zip(records["priority"].tolist(), ttls_s, strict=True)
    return [met.setdefault(pair, RetentionHint(*pair)) if pair not in met else met[pair] for pair in pairs]


def with_last_use(packed: bytes, used_at: float) -> bytes:
    """Return a packed record with another time of last use."""
    fields = bytearray(packed[: _FIELDS.size])
    struct.pack_into("<d", fields, 104, used_at)
    return bytes(fields) + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def with_hint(packed: bytes, hint: RetentionHint) -> bytes:
    """Return a packed record with another hint."""
    fields = bytearray(packed[: _FIELDS.size])
    struct.pack_into("<B", fields, 6, hint.priority)
    struct.pack_into("<f", fields, 112, math.nan if hint.ttl_s is None else hint.ttl_s)
    return bytes(fields) + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def block_checksum(key: BlockKey, generation: int, data: memoryview) -> int:
    """Return the XXH3-64 of `data`, seeded with key and generation."""
    seed = xxhash.xxh3_64_intdigest(key + _CHECK.pack(generation))
    return xxhash.xxh3_64_intdigest(data, seed=seed)


def sound_records(raw: memoryview, first_slot: int, block_bytes: int) -> npt.NDArray[np.int64]:
    """Return which of the records packed in `raw` are intact and belong to their slot.

    `raw` holds the records of slots ``first_slot, first_slot + 1, ...``; the result is positions in `raw`.
    A block of `block_bytes` may be stored in fewer.
    """
    table = np.frombuffer(raw, dtype=RECORD_DTYPE)
    plausible = (
        (table["magic"] == int.from_bytes(_MAGIC, "little"))
        & (table["version"] == DISK_FORMAT_VERSION)
        & (table["length"] - np.uint32(1) < block_bytes)
        & (table["slot"] == np.arange(first_slot, first_slot + len(table), dtype=np.uint32))
    )
    positions = np.flatnonzero(plausible)
    # A chain of C calls: a million records take a few tenths of a second.
    digests = map(xxhash.xxh3_64_intdigest, map(itemgetter(0), _CHECKED.iter_unpack(raw)))
    checks = np.fromiter(digests, dtype=np.uint64, count=len(table))
    sound: npt.NDArray[np.int64] = positions[checks[positions] == table["check"][positions]]
    return sound
