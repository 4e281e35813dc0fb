"""A prefix in a file: the blocks of one prompt, to be carried to another server or kept for a warm start.

Little-endian::

    8 bytes   magic "STEMMAKV"
    u32       number of blocks
    u32       length of the header
    u64       XXH3-64 of the header
    header    JSON: what `KeySpace` and the bytes depend on, root key, token ids
    then per block: u64 checksum seeded with its key, and the block's bytes

Keys aren't stored: they follow from root and token ids, so a file can't put bytes under a foreign key. The
file tells the prompt to whoever reads it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import BinaryIO

import xxhash

from stemma.errors import StorageError, StorageMismatch
from stemma.memory.tiers.disk.record import block_checksum
from stemma.prefix.keys import FORMAT_VERSION, KeySpace, chain_keys
from stemma.types import BlockKey, TokenArray, as_tokens

_MAGIC = b"STEMMAKV"
_PREAMBLE = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<Q")
_MAX_HEADER_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class BundleHeader:
    """What a file holds."""

    space: KeySpace
    block_bytes: int
    root: BlockKey
    """The namespace's root key."""
    tokens: TokenArray
    """A whole number of blocks."""
    num_blocks: int
    """Leading blocks that are in the file; the prompt may have more."""

    @property
    def keys(self) -> list[BlockKey]:
        """Keys of the blocks in the file."""
        return chain_keys(self.root, self.tokens, self.space.block_size)[: self.num_blocks]

    def check(self, space: KeySpace, root: BlockKey) -> None:
        """Raise StorageMismatch unless the bytes are meant for this model, layout and namespace."""
        mine, theirs = asdict(self.space), asdict(space)
        wrong = [
            f"{name} is {mine[name]!r}, not {theirs[name]!r}" for name in mine if mine[name] != theirs[name]
        ]
        if wrong:
            raise StorageMismatch("the file was exported for something else: " + "; ".join(wrong))
        if self.root != root:
            raise StorageMismatch("the file was exported in another namespace (cache_salt or adapter)")


def write_bundle(
    file: BinaryIO,
    space: KeySpace,
    root: BlockKey,
    tokens: TokenArray,
    blocks: Iterator[memoryview],
    block_bytes: int,
) -> int:
    """Write the full blocks of `tokens` that `blocks` yields, in order; return how many those were.

    `file` is seekable. `blocks` may end early: the file then holds a shorter prefix.
    """
    whole = tokens[: len(tokens) // space.block_size * space.block_size]
    fields = asdict(space) | {
        "key_format": FORMAT_VERSION,
        "block_bytes": block_bytes,
        "root": root.hex(),
        "token_ids": whole.tolist(),
    }
    header = json.dumps(fields).encode()
    digest = xxhash.xxh3_64_intdigest(header)
    file.write(_PREAMBLE.pack(_MAGIC, 0, len(header), digest))
    file.write(header)
    count = 0
    for key, data in zip(chain_keys(root, whole, space.block_size), blocks, strict=False):
        file.write(_CHECKSUM.pack(block_checksum(key, 0, data)))
        file.write(data)
        count += 1
    end = file.tell()
    file.seek(0)
    file.write(_PREAMBLE.pack(_MAGIC, count, len(header), digest))
    file.seek(end)
    return count


def read_header(file: BinaryIO) -> BundleHeader:
    """Read up to the first block. Raises StorageError if this is no bundle or a damaged one."""
    preamble = file.read(_PREAMBLE.size)
    if len(preamble) < _PREAMBLE.size or preamble[: len(_MAGIC)] != _MAGIC:
        raise StorageError("this is no exported prefix")
    _, num_blocks, length, digest = _PREAMBLE.unpack(preamble)
    if length > _MAX_HEADER_BYTES:
        raise StorageError("the exported prefix is damaged: impossible header length")
    raw = file.read(length)
    if len(raw) < length or xxhash.xxh3_64_intdigest(raw) != digest:
        raise StorageError("the exported prefix is damaged: its header fails the checksum")
    fields = json.loads(raw)
    if fields["key_format"] != FORMAT_VERSION:
        raise StorageMismatch(f"the file has key format {fields['key_format']}, not {FORMAT_VERSION}")
    space = KeySpace(fields["model_fingerprint"], fields["kv_layout"], fields["block_size"])
    root = BlockKey(bytes.fromhex(fields["root"]))
    tokens = as_tokens(fields["token_ids"])
    return BundleHeader(space, fields["block_bytes"], root, tokens, num_blocks)


def read_blocks(
    file: BinaryIO, header: BundleHeader, take: Callable[[int, BlockKey, memoryview], None]
) -> None:
    """Hand each block (position, key, bytes valid during the call) to `take`, once it is proved.

    Raises StorageError at the first damaged or missing one.
    """
    buffer = bytearray(header.block_bytes)
    view = memoryview(buffer)
    for position, key in enumerate(header.keys):
        checksum = file.read(_CHECKSUM.size)
        filled = 0
        while filled < len(buffer) and (part := file.read(len(buffer) - filled)):
            view[filled : filled + len(part)] = part
            filled += len(part)
        if len(checksum) < _CHECKSUM.size or filled < len(buffer):
            raise StorageError(f"the exported prefix ends within block {position}")
        if block_checksum(key, 0, view) != _CHECKSUM.unpack(checksum)[0]:
            raise StorageError(f"block {position} of the exported prefix fails its checksum")
        take(position, key, view)
