"""A prefix in a file: the blocks of one prompt, to be moved to another server or kept for a warm start.

Little-endian::

    8 bytes   magic "STEMMAKV"
    u32       format version, 4
    u32       1 if the file is signed, else 0
    u32       number of blocks
    u32       length of the header
    u32       number of token ids, a multiple of the block size
    32 bytes  signature: HMAC-SHA256 of everything else up to the blocks; SHA-256 if the file isn't signed
    header    JSON: what `KeySpace` and the bytes depend on, both root keys, number of published blocks, where
              the checkpoint lies (0: there is none) and its number of blocks
    i32 ...   token ids
    then per full block of the tokens: 32 bytes, SHA-256 of block key and bytes; zeros if it isn't in the file
    then the same per block of the checkpoint
    then the bytes of each block, and of each block of the checkpoint

Keys aren't stored: they are computed from roots and token ids, so a file can't put bytes under another key.
But whoever writes a file chooses the bytes, and with them what the model says after this prompt. So a file
is read only if one of our own servers signed it, or if the operator trusts it. Anyone who can read the file
can read the prompt.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import BinaryIO

import numpy as np

from stemma.errors import StorageError, StorageMismatch, UntrustedFile
from stemma.prefix.keys import FORMAT_VERSION, ChainRoots, KeySpace
from stemma.types import BlockKey, TokenArray

_MAGIC = b"STEMMAKV"
_VERSION = 4
_PREAMBLE = struct.Struct("<8sIIIII")
_DIGEST_BYTES = 32
_NO_DIGEST = bytes(_DIGEST_BYTES)
_KEY_BYTES = 32
_MAX_HEADER_BYTES = 65536
_MAX_TOKENS = 1 << 22
_MAX_BLOCK_BYTES = 1 << 32
_MAX_PIECES = 1 << 16
_NUMBERS = {
    **{"block_size": 1, "key_format": 1, "block_bytes": 1, "num_public": 0},
    **{"checkpoint": 0, "num_pieces": 0},
}
"""Numbers of the header, and the least that each may be."""
_TEXTS = ("model_fingerprint", "kv_layout", "root", "first_root")


@dataclass(frozen=True, slots=True)
class BundleTrust:
    """Which files are read. By default none are."""

    key: bytes | None = None
    """Secret shared by our servers: signs written files and verifies read ones."""
    takes_unsigned: bool = False
    """Whether the operator trusts files that this key didn't sign."""


@dataclass(frozen=True, slots=True)
class BundleHeader:
    """Header of a file."""

    space: KeySpace
    block_bytes: int
    roots: ChainRoots
    """Where the chain of the prompt begins, and where it goes on behind a published prefix."""
    tokens: TokenArray
    """Token ids, a whole number of blocks; none is negative."""
    num_blocks: int
    """Leading blocks that are in the file; the prompt may have more."""
    digests: bytes
    """SHA-256 of key and bytes of each block in the file."""
    checkpoint: int
    """Tokens before the checkpoint that is in the file, of a model that needs one; 0: there is none."""
    piece_digests: bytes
    """As `digests`, of the checkpoint's blocks."""

    @property
    def num_pieces(self) -> int:
        """Blocks of the checkpoint."""
        return len(self.piece_digests) // _DIGEST_BYTES

    @property
    def keys(self) -> list[BlockKey]:
        """Keys of the blocks in the file."""
        return self.roots.chain(self.tokens)[: self.num_blocks]

    def check(
        self, space: KeySpace, roots: ChainRoots, block_bytes: int, *, vocab_size: int | None = None
    ) -> None:
        """Raise StorageMismatch unless the bytes are meant for this model, layout and namespace.

        `roots` are those of the file's prompt here. `vocab_size`: the model's number of token ids, where it
        is known.
        """
        mine, theirs = asdict(self.space), asdict(space)
        wrong = [
            f"{name} is {mine[name]!r}, not {theirs[name]!r}" for name in mine if mine[name] != theirs[name]
        ]
        if self.block_bytes != block_bytes:
            wrong.append(f"a block has {self.block_bytes} bytes, not {block_bytes}")
        if vocab_size is not None and len(self.tokens) and int(self.tokens.max()) >= vocab_size:
            wrong.append(f"it has token id {int(self.tokens.max())}, the model {vocab_size} token ids")
        if wrong:
            raise StorageMismatch("the file was exported for something else: " + "; ".join(wrong))
        if self.roots.num_public != roots.num_public:
            raise StorageMismatch(
                f"{self.roots.num_public} leading blocks of the file's prompt were published where it was "
                f"exported, and {roots.num_public} are here: publish the same prefixes"
            )
        if self.roots != roots:
            raise StorageMismatch("the file was exported in another namespace (cache_salt or adapter)")


def write_bundle(
    file: BinaryIO,
    space: KeySpace,
    roots: ChainRoots,
    tokens: TokenArray,
    blocks: Iterator[memoryview],
    *,
    block_bytes: int,
    key: bytes | None = None,
    checkpoint: int = 0,
    pieces: Sequence[BlockKey] = (),
    read_piece: Callable[[int], memoryview] = lambda _number: memoryview(b""),
) -> int:
    """Write the full blocks of `tokens` that `blocks` yields, in order; return how many those were.

    `file` is seekable. `blocks` may end early, but not before the `checkpoint`: the file then holds a shorter
    prefix. `key` signs the file. `pieces` are the keys of the checkpoint's blocks, `read_piece` returns the
    bytes of one. Raises StorageError if there are too many tokens for a file.
    """
    num_full = len(tokens) // space.block_size
    whole = np.ascontiguousarray(tokens[: num_full * space.block_size], dtype="<i4")
    if len(whole) > _MAX_TOKENS:
        raise StorageError(f"an exported prefix has up to {_MAX_TOKENS} tokens, this one has {len(whole)}")
    fields = asdict(space) | {
        "key_format": FORMAT_VERSION,
        "block_bytes": block_bytes,
        "root": roots.own.hex(),
        "first_root": roots.first.hex(),
        "num_public": roots.num_public,
        "checkpoint": checkpoint,
        "num_pieces": len(pieces),
    }
    header = json.dumps(fields).encode()
    start = file.tell()
    file.seek(start + _first_block(len(header), len(whole), num_full + len(pieces)))
    digests = bytearray()
    for block_key, data in zip(roots.chain(whole), blocks, strict=False):
        digests += _digest(block_key, data)
        file.write(data)
    count = len(digests) // _DIGEST_BYTES
    assert count * space.block_size >= checkpoint
    piece_digests = bytearray()
    for number, piece in enumerate(pieces):
        data = read_piece(number)
        piece_digests += _digest(piece, data)
        file.write(data)
    end = file.tell()
    preamble = _PREAMBLE.pack(_MAGIC, _VERSION, key is not None, count, len(header), len(whole))
    table = bytes(digests) + _NO_DIGEST * (num_full - count) + bytes(piece_digests)
    rest = header + whole.tobytes() + table
    file.seek(start)
    file.write(preamble + _signature(key, preamble, rest) + rest)
    file.seek(end)
    return count


def read_header(file: BinaryIO, trust: BundleTrust) -> BundleHeader:
    """Read up to the first block.

    Raises UntrustedFile if `trust` doesn't cover the file, StorageError if this isn't a bundle or is damaged,
    StorageMismatch if it has another format. Only the preamble is parsed before the signature is verified.
    """
    preamble = file.read(_PREAMBLE.size)
    if len(preamble) < _PREAMBLE.size or preamble[: len(_MAGIC)] != _MAGIC:
        raise StorageError("this is no exported prefix")
    _, version, is_signed, num_blocks, header_bytes, num_tokens = _PREAMBLE.unpack(preamble)
    if version != _VERSION:
        raise StorageMismatch(f"the file has format {version}, not {_VERSION}; export it again")
    if is_signed > 1 or header_bytes > _MAX_HEADER_BYTES or num_tokens > _MAX_TOKENS:
        raise StorageError("the exported prefix is damaged: impossible lengths")
    signature = file.read(_DIGEST_BYTES)
    raw = file.read(header_bytes + 4 * num_tokens)
    if len(raw) < header_bytes + 4 * num_tokens:
        raise StorageError("the exported prefix ends within its header")
    # The header holds the block size, which gives the length of the table. It is still untrusted here.
    space, block_bytes, roots, (checkpoint, num_pieces) = _parse(raw[:header_bytes])
    num_full, rest = divmod(num_tokens, space.block_size)
    table_bytes = (num_full + num_pieces) * _DIGEST_BYTES
    table = file.read(table_bytes)
    num_before, between = divmod(checkpoint, space.block_size)
    is_apart = between or num_before > num_blocks or (checkpoint > 0) != (num_pieces > 0)
    if rest or num_blocks > num_full or len(table) < table_bytes or is_apart:
        raise StorageError("the exported prefix is damaged: its lengths disagree")
    _prove(trust, is_signed != 0, signature, preamble, raw + table)
    tokens = np.frombuffer(raw, dtype="<i4", offset=header_bytes).astype(np.int32)
    if len(tokens) and int(tokens.min()) < 0:
        raise StorageError("the exported prefix is damaged: a token id is negative")
    digests, piece_digests = table[: num_blocks * _DIGEST_BYTES], table[num_full * _DIGEST_BYTES :]
    return BundleHeader(space, block_bytes, roots, tokens, num_blocks, digests, checkpoint, piece_digests)


def read_blocks(
    file: BinaryIO, header: BundleHeader, take: Callable[[int, BlockKey, memoryview], None]
) -> None:
    """Pass each verified block (position, key, bytes valid during the call) to `take`.

    Call it after `header.check`, which bounds the size of a block. Raises StorageError at the first damaged
    or missing one.
    """
    _read(file, header.block_bytes, header.keys, header.digests, take)


def read_pieces(
    file: BinaryIO,
    header: BundleHeader,
    pieces: Sequence[BlockKey],
    take: Callable[[int, BlockKey, memoryview], None],
) -> None:
    """Pass each verified block of the checkpoint to `take`, after `read_blocks`.

    `pieces` are their keys here. Raises StorageError at the first damaged or missing one.
    """
    _read(file, header.block_bytes, pieces, header.piece_digests, take)


def _read(
    file: BinaryIO,
    block_bytes: int,
    keys: Sequence[BlockKey],
    digests: bytes,
    take: Callable[[int, BlockKey, memoryview], None],
) -> None:
    buffer = bytearray(block_bytes)
    view = memoryview(buffer)
    for number, key in enumerate(keys):
        filled = 0
        while filled < len(buffer) and (part := file.read(len(buffer) - filled)):
            view[filled : filled + len(part)] = part
            filled += len(part)
        if filled < len(buffer):
            raise StorageError(f"the exported prefix ends within block {number}")
        expected = digests[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES]
        if not hmac.compare_digest(_digest(key, view), expected):
            raise StorageError(f"block {number} of the exported prefix fails its checksum")
        take(number, key, view)


def _first_block(header_bytes: int, num_tokens: int, num_digests: int) -> int:
    return _PREAMBLE.size + _DIGEST_BYTES + header_bytes + 4 * num_tokens + num_digests * _DIGEST_BYTES


def _digest(key: BlockKey, data: memoryview) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(data)
    return digest.digest()


def _signature(key: bytes | None, preamble: bytes, rest: bytes) -> bytes:
    if key is None:
        return hashlib.sha256(preamble + rest).digest()
    return hmac.digest(key, b"stemma bundle" + preamble + rest, "sha256")


def _prove(trust: BundleTrust, is_signed: bool, signature: bytes, preamble: bytes, rest: bytes) -> None:
    """Raise unless the file is undamaged and trusted."""
    if is_signed and trust.key is not None:
        if hmac.compare_digest(signature, _signature(trust.key, preamble, rest)):
            return
        if not trust.takes_unsigned:
            raise UntrustedFile("the exported prefix is damaged, or signed with another key than this one's")
    if not trust.takes_unsigned:
        how = "is signed, and this server has no key to prove it" if is_signed else "isn't signed"
        raise UntrustedFile(f"the exported prefix {how}; --trust-imports accepts it")
    if not is_signed and not hmac.compare_digest(signature, _signature(None, preamble, rest)):
        raise StorageError("the exported prefix is damaged: its header fails the checksum")


def _parse(raw: bytes) -> tuple[KeySpace, int, ChainRoots, tuple[int, int]]:
    """Return key space, bytes per block, root keys, and where the checkpoint lies and how many blocks it has.

    Raises StorageError for anything malformed.
    """
    try:
        fields = json.loads(raw)
        if not isinstance(fields, dict) or fields.keys() != {*_NUMBERS, *_TEXTS}:
            raise ValueError("other fields")
        for name, least in _NUMBERS.items():
            if type(fields[name]) is not int or fields[name] < least:
                raise ValueError(name)
        for name in _TEXTS:
            if type(fields[name]) is not str:
                raise ValueError(name)
        own, first = (BlockKey(bytes.fromhex(fields[name])) for name in ("root", "first_root"))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"the exported prefix is damaged: its header can't be read ({error})") from error
    if (
        {len(own), len(first)} != {_KEY_BYTES}
        or fields["num_public"] > _MAX_TOKENS
        or fields["block_size"] > _MAX_TOKENS
        or fields["block_bytes"] > _MAX_BLOCK_BYTES
        or fields["num_pieces"] > _MAX_PIECES
        or fields["checkpoint"] > _MAX_TOKENS
    ):
        raise StorageError("the exported prefix is damaged: impossible sizes")
    if fields["key_format"] != FORMAT_VERSION:
        raise StorageMismatch(f"the file has key format {fields['key_format']}, not {FORMAT_VERSION}")
    space = KeySpace(fields["model_fingerprint"], fields["kv_layout"], fields["block_size"])
    roots = ChainRoots(first, own, fields["num_public"], space.block_size)
    if not roots.num_public and first != own:
        raise StorageError("the exported prefix is damaged: its root keys disagree")
    return space, fields["block_bytes"], roots, (fields["checkpoint"], fields["num_pieces"])
