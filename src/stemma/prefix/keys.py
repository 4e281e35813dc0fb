"""Block keys: SHA-256 chained over everything that a block's KV depends on.

``key[i] = SHA256(key[i-1] || tokens of block i as little-endian int32)``, and ``key[-1]`` is the *root*,
which binds format version, model, KV dtype and layout, block size, adapter and tenant salt. The fields of
the root are length-prefixed, so no two different lists of fields give the same bytes. Keys are equal in
every process and on every machine; they never depend on Python's hash seed. A shorter last block is hashed
the same way: its input is shorter than any full block's, so the two can't be confused.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

import numpy as np

from stemma.types import BlockKey, Fingerprints, TokenArray

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Namespace:
    """Isolates tenants and adapters: equal tokens in different namespaces never share a block."""

    salt: str = ""
    adapter: str = ""
    owner: str = field(default="", compare=False)
    """Whose blocks these are, for quotas and bills. No part of keys: salt and adapter alone isolate."""


DEFAULT_NAMESPACE = Namespace()


@dataclass(frozen=True, slots=True)
class KeySpace:
    """What all keys of one engine have in common; two engines share KV if and only if these are equal."""

    model_fingerprint: str
    kv_layout: str
    """`KVLayout.describe()`: dtype, layers, heads, dimensions, order of axes; and the numeric path that
    computed the KV, unless machines of all kinds are to share it."""
    block_size: int

    def root(self, namespace: Namespace) -> BlockKey:
        """Return the key that starts the chain of `namespace`."""
        parts = (
            b"stemma",
            str(FORMAT_VERSION).encode(),
            self.model_fingerprint.encode(),
            self.kv_layout.encode(),
            str(self.block_size).encode(),
            namespace.adapter.encode(),
            namespace.salt.encode(),
        )
        digest = hashlib.sha256()
        for part in parts:
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
        return BlockKey(digest.digest())


def chain_keys(parent: BlockKey, tokens: TokenArray, block_size: int) -> list[BlockKey]:
    """Return the keys of all *full* blocks of `tokens`, which follow the block named `parent`.

    `tokens` must start at a block boundary. Costs one SHA-256 of ``32 + 4 * block_size`` bytes per block.
    """
    data = memoryview(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    stride = 4 * block_size
    sha256 = hashlib.sha256
    keys: list[BlockKey] = []
    append = keys.append
    key: bytes = parent
    for start in range(0, len(data) - stride + 1, stride):
        key = sha256(key + data[start : start + stride]).digest()
        append(BlockKey(key))
    return keys


def partial_key(parent: BlockKey, tokens: TokenArray) -> BlockKey:
    """Return the key of a last block that holds fewer than `block_size` tokens."""
    return BlockKey(hashlib.sha256(parent + np.ascontiguousarray(tokens, dtype="<i4").tobytes()).digest())


def fingerprints(keys: list[BlockKey]) -> Fingerprints:
    """Return the first 8 bytes of each key as uint64, for policies that remember evicted blocks."""
    return np.frombuffer(b"".join(key[:8] for key in keys), dtype="<u8").astype(np.uint64, copy=False)
