"""The header in front of each value in a pool: it proves that the bytes are the ones that were put.

Pools lose, truncate and mix up values (a store that acknowledges a put it didn't do, two writers of one file,
an operator's script). 64 bytes, little-endian:

======  =====  ==========================================================
offset  bytes  field
======  =====  ==========================================================
0       8      magic ``STEMMAKV``
8       2      version of this header, 1
10      1      priority + 1; 0: nothing is known of hints
11      1      zero
12      4      time to live after last use, seconds (float32, NaN: none)
16      8      length of the payload; shorter than a block: packed (`block_codec.py`)
24      16     XXH3-128 of the key's text
40      8      XXH3-64 of the payload
48      4      `session_number` of the conversation that left the block, 0: none
52      4      zero
56      8      XXH3-64 of the 56 bytes before
======  =====  ==========================================================

XXH3 finds accidents, not attackers: whoever can write to a pool is trusted (docs/how-to/tiers.md).
"""

from __future__ import annotations

import math
import struct
from enum import StrEnum

import xxhash

from stemma.memory.tiers.device_block import NO_NOTES, BlockNotes
from stemma.types import NO_HINT, RetentionHint

MAGIC = b"STEMMAKV"
VERSION = 1
HEADER_BYTES = 64
_FIELDS = struct.Struct("<8sHBxfQ16sQI4x")
_CHECK = struct.Struct("<Q")


class Damage(StrEnum):
    """Reason why a value can't be used."""

    HEADER = "bad_header"
    VERSION = "bad_version"
    KEY = "wrong_key"
    LENGTH = "wrong_length"
    CHECKSUM = "checksum"


def seal(key: str, payload: memoryview, header: memoryview, notes: BlockNotes = NO_NOTES) -> None:
    """Write the header of `payload` under `key` into `header` (`HEADER_BYTES` writable bytes)."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        notes.hint.priority + 1,
        math.nan if notes.hint.ttl_s is None else notes.hint.ttl_s,
        payload.nbytes,
        xxhash.xxh3_128_digest(key.encode()),
        xxhash.xxh3_64_intdigest(payload),
        notes.session,
    )
    header[: _FIELDS.size] = fields
    header[_FIELDS.size :] = _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def damage(key: str, header: memoryview, room: memoryview) -> Damage | None:
    """Return what is wrong with a value that was read, or None if it is what was put under `key`.

    The payload begins `room`, which it may not fill.
    """
    fields = header[: _FIELDS.size]
    magic, version, _, _, length, key_digest, checksum, _ = _FIELDS.unpack(fields)
    if magic != MAGIC or _CHECK.unpack(header[_FIELDS.size :])[0] != xxhash.xxh3_64_intdigest(fields):
        return Damage.HEADER
    if version != VERSION:
        return Damage.VERSION
    if key_digest != xxhash.xxh3_128_digest(key.encode()):
        return Damage.KEY
    if length > room.nbytes:
        return Damage.LENGTH
    if checksum != xxhash.xxh3_64_intdigest(room[:length]):
        return Damage.CHECKSUM
    return None


def payload_bytes(header: memoryview) -> int:
    """Return the length of the payload behind a sound header."""
    length: int = _FIELDS.unpack(header[: _FIELDS.size])[4]
    return length


def notes_in(header: memoryview) -> BlockNotes:
    """Return what the block of a sound header came with; versions without such fields left zeros there."""
    _, _, raised, ttl_s, _, _, _, session = _FIELDS.unpack(header[: _FIELDS.size])
    return BlockNotes(RetentionHint(raised - 1, ttl_s) if raised else NO_HINT, session)
