from __future__ import annotations

import io

import numpy as np
import pytest
from tests.contracts.block_store_suite import bytes_of

from stemma.errors import StorageError, StorageMismatch
from stemma.memory.tiers.bundle import read_blocks, read_header, write_bundle
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, Namespace, chain_keys

SPACE = KeySpace("model-a", "layout-a", 16)
ROOT = SPACE.root(DEFAULT_NAMESPACE)
TOKENS = np.arange(53, dtype=np.int32)
KEYS = chain_keys(ROOT, TOKENS, 16)
BLOCK_BYTES = 1000


def written(num_blocks: int = 3) -> bytes:
    file = io.BytesIO()
    blocks = (memoryview(bytes_of(key, BLOCK_BYTES)) for key in KEYS[:num_blocks])
    assert write_bundle(file, SPACE, ROOT, TOKENS, blocks, BLOCK_BYTES) == num_blocks
    return file.getvalue()


def read(content: bytes) -> list[bytes]:
    file = io.BytesIO(content)
    taken: list[bytes] = []
    read_blocks(file, read_header(file), lambda _position, _key, data: taken.append(bytes(data)))
    return taken


@pytest.mark.parametrize("num_blocks", [0, 2, 3])
def test_round_trip(num_blocks: int) -> None:
    content = written(num_blocks)
    header = read_header(io.BytesIO(content))
    assert header.keys == KEYS[:num_blocks]
    assert header.tokens.tolist() == TOKENS[:48].tolist()
    assert read(content) == [bytes_of(key, BLOCK_BYTES) for key in KEYS[:num_blocks]]


def test_every_damage_is_noticed() -> None:
    content = written()
    sound = read(content)
    for at in range(0, len(content), 37):
        damaged = bytearray(content)
        damaged[at] ^= 1
        try:
            blocks = read(bytes(damaged))
        except StorageError:
            continue
        # Only the count of blocks isn't covered by a checksum; fewer of them are still the right ones.
        assert 8 <= at < 12
        assert blocks == sound[: len(blocks)]


def test_a_shorter_file_is_noticed() -> None:
    content = written()
    for length in (0, 5, 30, 200, len(content) - 1):
        with pytest.raises(StorageError):
            read(content[:length])


def test_it_belongs_to_one_model_and_one_namespace() -> None:
    header = read_header(io.BytesIO(written()))
    header.check(SPACE, ROOT)
    with pytest.raises(StorageMismatch, match="model_fingerprint is 'model-a', not 'model-b'"):
        header.check(KeySpace("model-b", "layout-a", 16), ROOT)
    with pytest.raises(StorageMismatch, match="namespace"):
        header.check(SPACE, SPACE.root(Namespace(salt="other")))
