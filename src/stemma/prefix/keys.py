"""Block keys: SHA-256 chained over everything that a block's KV depends on.

``key[i] = SHA256(key[i-1] || tokens of block i as little-endian int32)``, and ``key[-1]`` is the *root*,
which binds format version, model, KV dtype and layout, block size, adapter and tenant salt. The fields of
the root are length-prefixed, so no two different lists of fields give the same bytes. Keys are equal in
every process and on every machine; they never depend on Python's hash seed. A shorter last block is hashed
the same way: its input is shorter than any full block's, so the two can't be confused.

A prompt whose head is published has two roots: the head's chain starts at the root of the public namespace,
equal for all, and the rest at a root that binds its own namespace and the head's tokens.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from stemma.types import BlockKey, Fingerprints, TokenArray

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class PublicHead:
    """The leading tokens of a prompt that every namespace shares, because an operator published them."""

    num_tokens: int
    """A whole number of blocks, above 0."""
    digest: bytes
    """SHA-256 of these tokens as little-endian int32."""

    @classmethod
    def of(cls, tokens: TokenArray) -> PublicHead:
        """Return the head that consists of `tokens`."""
        return cls(len(tokens), hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i4").tobytes()).digest())


@dataclass(frozen=True, slots=True)
class Namespace:
    """Isolates tenants and adapters: equal tokens in different namespaces never share a block."""

    salt: str = ""
    adapter: str = ""
    owner: str = field(default="", compare=False)
    """Whose blocks these are, for quotas and bills. No part of keys: the other fields isolate."""
    head: PublicHead | None = None
    """Shared with all namespaces of the adapter. Who sets it has compared the prompt's tokens."""
    is_public: bool = False
    """Holds the heads themselves; no client's salt leads here."""

    @property
    def public(self) -> Namespace:
        """Where the blocks of `head` lie."""
        return Namespace(adapter=self.adapter, is_public=True)

    def num_shared_with(self, other: Namespace) -> int | None:
        """Return how many leading tokens two prompts can share; None: as many as are equal."""
        if self == other:
            return None
        if self.head is None or self.head != other.head or self.adapter != other.adapter:
            return 0
        return self.head.num_tokens


DEFAULT_NAMESPACE = Namespace()


@lru_cache(maxsize=4096)
def owner_tag(owner: str) -> str:
    """Return how the tiers below the device name an owner: 16 hex digits, or nothing for nobody.

    64 bits fit a record on disk, and a file shows no tenant's name.
    """
    return hashlib.sha256(b"stemma owner\0" + owner.encode()).hexdigest()[:16] if owner else ""


def session_number(namespace: Namespace, name: str) -> int:
    """Return the number of the session that clients of `namespace` call `name`: 32 bits, 0 only for "".

    The same after a restart and on every machine. A tenant's salt holds the server's secret
    (`server/door/namespace.py`), so nobody can work out the number of another tenant's session.
    """
    if not name:
        return 0
    told = f"{len(namespace.salt)}:{namespace.salt}{len(namespace.adapter)}:{namespace.adapter}{name}"
    digest = hashlib.sha256(b"stemma session\0" + told.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:4], "little") or 1


@dataclass(frozen=True, slots=True)
class KeySpace:
    """The part that all keys of one engine share; two engines share KV if and only if these are equal."""

    model_fingerprint: str
    kv_layout: str
    """`KVLayout.describe()`: dtype, layers, heads, dimensions, order of axes; and the numeric path that
    computed the KV, unless machines of all kinds are to share it."""
    block_size: int

    def root(self, namespace: Namespace) -> BlockKey:
        """Return the key that starts the chain of `namespace`."""
        return _root(self, namespace)

    def roots(self, namespace: Namespace) -> ChainRoots:
        """Return the keys that start the chain of a prompt of `namespace`, its public head included."""
        own, head = self.root(namespace), namespace.head
        if head is None:
            return ChainRoots(own, own, 0, self.block_size)
        return ChainRoots(
            self.root(namespace.public), own, head.num_tokens // self.block_size, self.block_size
        )


@lru_cache(maxsize=256)
def _root(space: KeySpace, namespace: Namespace) -> BlockKey:
    parts: tuple[bytes, ...] = (
        b"stemma",
        str(FORMAT_VERSION).encode(),
        space.model_fingerprint.encode(),
        space.kv_layout.encode(),
        str(space.block_size).encode(),
        namespace.adapter.encode(),
        namespace.salt.encode(),
    )
    if namespace.is_public:
        parts += (b"public",)
    if namespace.head is not None:
        parts += (b"behind", namespace.head.digest)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return BlockKey(digest.digest())


@dataclass(frozen=True, slots=True)
class ChainRoots:
    """The two keys that the blocks of a prompt are chained to; one and the same without a public head."""

    first: BlockKey
    """Comes before block 0."""
    own: BlockKey
    """Comes before block `num_public`."""
    num_public: int
    """Blocks of the public head."""
    block_size: int

    def chain(self, tokens: TokenArray) -> list[BlockKey]:
        """Return the keys of all full blocks of a prompt."""
        return self.extend(0, self.first, tokens)

    def extend(self, start: int, last: BlockKey, tokens: TokenArray) -> list[BlockKey]:
        """Return the keys of the full blocks of `tokens`, which begin at block `start` behind key `last`."""
        size, total = self.block_size, len(tokens) // self.block_size
        num_head = max(0, min(self.num_public - start, total))
        keys = chain_keys(self.before(start, last), tokens[: num_head * size], size)
        if total > num_head:
            behind = self.before(start + num_head, keys[-1] if keys else last)
            keys += chain_keys(behind, tokens[num_head * size :], size)
        return keys

    def before(self, block: int, last: BlockKey) -> BlockKey:
        """Return what block number `block` is chained to; `last` is the key of the block before it."""
        if block == self.num_public:
            return self.own
        return last if block else self.first


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
