"""Small prefix caches whose blocks are computed and verified without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.memory.buffers import HashBuffer

from stemma.memory.cache.lease import Lease
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.prefix.explain import Miss
from stemma.prefix.hashed import HashIndex
from stemma.prefix.index import PrefixIndex
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, Namespace
from stemma.prefix.radix import RadixIndex

NS = DEFAULT_NAMESPACE


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_index(kind: str, key_space: KeySpace) -> PrefixIndex | None:
    if kind == "off":
        return None
    return RadixIndex(key_space.block_size) if kind == "radix" else HashIndex(key_space)


def make_cache(num_blocks: int, block_size: int, kind: str = "radix", **options) -> PrefixCache:
    key_space = KeySpace("model", "layout", block_size)
    buffer = HashBuffer(num_blocks, block_size)
    return PrefixCache(buffer, make_index(kind, key_space), key_space, clock=Clock(), **options)


def tokens(*values: int | range) -> np.ndarray:
    flat = [t for v in values for t in (v if isinstance(v, range) else [v])]
    return np.array(flat, dtype=np.int32)


def buffer_of(cache: PrefixCache) -> HashBuffer:
    """Return the buffer of a cache that `make_cache` made."""
    assert isinstance(cache.buffer, HashBuffer)
    return cache.buffer


def reserved(
    cache: PrefixCache, namespace: Namespace, prompt: np.ndarray, *args: Any, **options: Any
) -> Lease:
    """Return the lease that a cache with room gives."""
    lease = cache.reserve(namespace, prompt, *args, **options)
    assert lease is not None
    return lease


def forked(cache: PrefixCache, lease: Lease, num_computed: int) -> Lease:
    """Return the second lease that a cache with room gives."""
    twin = cache.fork(lease, num_computed)
    assert twin is not None
    return twin


def miss_of(lease: Lease) -> Miss:
    """Return why a lease has no more cached tokens."""
    assert lease.miss is not None
    return lease.miss


def compute_all(cache: PrefixCache, lease, *, check_head: bool = True) -> None:
    """Compute what a lease misses, verify all of it, and commit."""
    buffer = buffer_of(cache)
    if check_head:
        buffer.verify(lease, lease.num_cached_tokens)
    buffer.compute(lease, lease.num_cached_tokens, lease.num_tokens)
    buffer.verify(lease, lease.num_tokens)
    cache.commit(lease, lease.num_tokens)


def run(cache: PrefixCache, prompt: np.ndarray, namespace: Namespace = NS) -> int:
    """Serve a prompt to its end; return how many tokens came from cache."""
    lease = reserved(cache, namespace, prompt)
    compute_all(cache, lease)
    num_cached = lease.num_cached_tokens
    cache.free(lease, lease.num_tokens)
    cache.check()
    return num_cached
