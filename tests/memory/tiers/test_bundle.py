"""Exported prefixes: round trip, every damage, and files that somebody made up."""

from __future__ import annotations

import io
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contracts.block_store_suite import bytes_of

from stemma.errors import StorageError, StorageMismatch, UntrustedFile
from stemma.memory.tiers.bundle import BundleTrust, read_blocks, read_header, read_pieces, write_bundle
from stemma.prefix.keys import DEFAULT_NAMESPACE, ChainRoots, KeySpace, Namespace, PublicHead
from stemma.types import BlockKey

SPACE = KeySpace("model-a", "layout-a", 16)
ROOTS = SPACE.roots(DEFAULT_NAMESPACE)
TOKENS = np.arange(53, dtype=np.int32)
KEYS = ROOTS.chain(TOKENS)
BLOCK_BYTES = 1000
SECRET = b"0123456789abcdef0123456789abcdef"
OURS = BundleTrust(key=SECRET)
ANY = BundleTrust(takes_unsigned=True)


def written(
    num_blocks: int = 3,
    tokens: np.ndarray = TOKENS,
    key: bytes | None = SECRET,
    roots: ChainRoots = ROOTS,
) -> bytes:
    file = io.BytesIO()
    keys = roots.chain(tokens)
    blocks = (memoryview(bytes_of(key, BLOCK_BYTES)) for key in keys[:num_blocks])
    assert write_bundle(file, SPACE, roots, tokens, blocks, block_bytes=BLOCK_BYTES, key=key) == num_blocks
    assert file.tell() == len(file.getvalue())
    return file.getvalue()


def read(content: bytes, trust: BundleTrust = OURS, roots: ChainRoots = ROOTS) -> list[bytes]:
    file = io.BytesIO(content)
    taken: list[bytes] = []
    header = read_header(file, trust)
    header.check(SPACE, roots, BLOCK_BYTES, vocab_size=1000)
    read_blocks(file, header, lambda _position, _key, data: taken.append(bytes(data)))
    return taken


@pytest.mark.parametrize("key", [SECRET, None])
@pytest.mark.parametrize("num_blocks", [0, 2, 3])
def test_round_trip(num_blocks: int, key: bytes | None) -> None:
    content = written(num_blocks, key=key)
    header = read_header(io.BytesIO(content), OURS if key else ANY)
    assert header.keys == KEYS[:num_blocks]
    assert header.tokens.tolist() == TOKENS[:48].tolist()
    assert read(content, OURS if key else ANY) == [bytes_of(key, BLOCK_BYTES) for key in KEYS[:num_blocks]]


PIECES = [BlockKey(bytes([number]) * 32) for number in range(2)]


def with_checkpoint(position: int = 32, pieces: list[BlockKey] = PIECES) -> bytes:
    file = io.BytesIO()
    blocks = (memoryview(bytes_of(key, BLOCK_BYTES)) for key in KEYS)
    write_bundle(
        file,
        SPACE,
        ROOTS,
        TOKENS,
        blocks,
        block_bytes=BLOCK_BYTES,
        key=SECRET,
        checkpoint=position,
        pieces=pieces,
        read_piece=lambda number: memoryview(bytes_of(pieces[number], BLOCK_BYTES)),
    )
    return file.getvalue()


def read_checkpoint(content: bytes) -> list[bytes]:
    file, taken = io.BytesIO(content), []
    header = read_header(file, OURS)
    header.check(SPACE, ROOTS, BLOCK_BYTES, vocab_size=1000)
    read_blocks(file, header, lambda _position, _key, _data: None)
    assert (header.checkpoint, header.num_pieces) == (32, 2)
    read_pieces(file, header, PIECES, lambda _number, _key, data: taken.append(bytes(data)))
    return taken


def test_a_checkpoint_travels_and_every_damage_of_it_is_noticed() -> None:
    content = with_checkpoint()
    assert read_checkpoint(content) == [bytes_of(key, BLOCK_BYTES) for key in PIECES]
    for at in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[at] ^= 1
        with pytest.raises(StorageError):
            read_checkpoint(bytes(damaged))
    with pytest.raises(StorageError, match="ends within block 1"):
        read_checkpoint(content[:-1])


@pytest.mark.parametrize(("position", "pieces"), [(40, PIECES), (32, []), (0, PIECES)])
def test_a_checkpoint_that_cant_be_is_refused(position: int, pieces: list[BlockKey]) -> None:
    with pytest.raises(StorageError, match="its lengths disagree"):
        read_header(io.BytesIO(with_checkpoint(position, pieces)), OURS)


@pytest.mark.parametrize("key", [SECRET, None])
def test_every_damage_is_noticed(key: bytes | None) -> None:
    content = written(key=key)
    for at in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[at] ^= 1
        with pytest.raises(StorageError):
            read(bytes(damaged), BundleTrust(key, takes_unsigned=key is None))


def test_a_shorter_file_is_noticed() -> None:
    content = written()
    for length in (0, 5, 30, 60, 200, 400, len(content) - 1):
        with pytest.raises(StorageError):
            read(content[:length])


def test_only_what_our_servers_signed_is_read() -> None:
    with pytest.raises(UntrustedFile, match="isn't signed"):
        read(written(key=None))
    with pytest.raises(UntrustedFile, match="another key"):
        read(written(key=b"x" * 32))
    with pytest.raises(UntrustedFile, match="no key"):
        read(written(), BundleTrust())
    # The operator vouches for it.
    for content in (written(key=None), written(key=b"x" * 32), written()):
        assert len(read(content, BundleTrust(SECRET, takes_unsigned=True))) == 3


def test_bytes_that_are_not_this_prompts_are_refused_even_with_a_valid_checksum() -> None:
    """Blocks of one signed file can't be spliced into another one."""
    first, second = written(), written(tokens=TOKENS + 100)
    start = len(first) - 3 * BLOCK_BYTES
    with pytest.raises(StorageError, match="block 0"):
        read(first[:start] + second[start:])


def test_it_belongs_to_one_model_one_layout_and_one_namespace() -> None:
    header = read_header(io.BytesIO(written()), OURS)
    header.check(SPACE, ROOTS, BLOCK_BYTES)
    with pytest.raises(StorageMismatch, match="model_fingerprint is 'model-a', not 'model-b'"):
        header.check(KeySpace("model-b", "layout-a", 16), ROOTS, BLOCK_BYTES)
    with pytest.raises(StorageMismatch, match="1000 bytes, not 2000"):
        header.check(SPACE, ROOTS, 2000)
    with pytest.raises(StorageMismatch, match="token id 47, the model 40"):
        header.check(SPACE, ROOTS, BLOCK_BYTES, vocab_size=40)
    with pytest.raises(StorageMismatch, match="namespace"):
        header.check(SPACE, SPACE.roots(Namespace(salt="other")), BLOCK_BYTES)


def test_a_prompt_behind_a_published_prefix() -> None:
    """Its blocks are those of two chains; both ends must have published the same tokens."""
    head = Namespace(salt="ada", head=PublicHead.of(TOKENS[:32]))
    roots = SPACE.roots(head)
    content = written(roots=roots)
    assert read(content, roots=roots) == [bytes_of(key, BLOCK_BYTES) for key in roots.chain(TOKENS)]
    assert roots.chain(TOKENS)[:2] == SPACE.roots(head.public).chain(TOKENS)[:2]
    with pytest.raises(StorageMismatch, match=r"2 leading blocks .* were published .* 0 are here"):
        read(content, roots=SPACE.roots(Namespace(salt="ada")))
    with pytest.raises(StorageMismatch, match="another namespace"):
        read(content, roots=SPACE.roots(Namespace(salt="bob", head=head.head)))


def test_a_negative_token_id_is_refused() -> None:
    """One of them in the tree ended the step loop when somebody drew it."""
    with pytest.raises(StorageError, match="negative"):
        read(written(tokens=np.full(53, -5, dtype=np.int32)))


def _forged(fields: object, num_blocks: int, tokens: list[int], table: bytes) -> bytes:
    header = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    raw = np.array(tokens, dtype="<i4").tobytes()
    return (
        struct.pack("<8sIIIII", b"STEMMAKV", 3, 0, num_blocks, len(header), len(tokens))
        + bytes(32)
        + (header + raw + table)
    )


GOOD = {
    "model_fingerprint": "model-a",
    "kv_layout": "layout-a",
    "block_size": 16,
    "key_format": 1,
    "block_bytes": BLOCK_BYTES,
    "root": ROOTS.own.hex(),
    "first_root": ROOTS.first.hex(),
    "num_public": 0,
}


@pytest.mark.parametrize(
    "fields",
    [
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"block_size": ' + b"9" * 6000 + b"}",
        [],
        GOOD | {"block_size": 0},
        GOOD | {"block_size": -16},
        GOOD | {"block_size": True},
        GOOD | {"block_size": 1.5},
        GOOD | {"block_bytes": 1 << 60},
        GOOD | {"block_bytes": None},
        GOOD | {"root": "zz"},
        GOOD | {"root": "00"},
        GOOD | {"root": 7},
        GOOD | {"first_root": "00" * 32},
        GOOD | {"num_public": -1},
        GOOD | {"num_public": 1 << 40},
        GOOD | {"model_fingerprint": ["model-a"]},
        GOOD | {"extra": 1},
        {name: value for name, value in GOOD.items() if name != "root"},
    ],
)
def test_a_made_up_header_is_a_storage_error(fields: object) -> None:
    with pytest.raises(StorageError):
        read(_forged(fields, 1, list(range(16)), bytes(32)), ANY)


@settings(max_examples=150, deadline=None)
@given(
    content=st.binary(max_size=300),
    numbers=st.lists(st.integers(0, 2**32 - 1), min_size=5, max_size=5),
    is_framed=st.booleans(),
)
def test_no_file_raises_anything_else(content: bytes, numbers: list[int], is_framed: bool) -> None:
    if is_framed:
        content = b"STEMMAKV" + struct.pack("<IIIII", 3, *(n % 400 for n in numbers[1:])) + content
    with pytest.raises(StorageError):
        read(content, ANY)
