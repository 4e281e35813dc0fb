"""A device buffer whose "KV" of a token is a hash of everything before it: wrong reuse can't go unseen."""

from __future__ import annotations

import hashlib

import numpy as np

from stemma.memory.cache.lease import Lease
from stemma.memory.cache.leased_blocks import BlockBuffer
from stemma.prefix.keys import Namespace


def expected_kv(namespace: Namespace, tokens: np.ndarray) -> list[int]:
    """Return the KV of each token: a hash chained over namespace and tokens."""
    digest = hashlib.sha256(f"{namespace.salt}|{namespace.adapter}".encode())
    values = []
    for token in tokens.tolist():
        digest.update(token.to_bytes(4, "little", signed=True))
        values.append(int.from_bytes(digest.digest()[:7], "little"))
    return values


class HashBuffer(BlockBuffer):
    """One int64 a token. Copies act at once, as a device's do in stream order."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.data = np.zeros((num_blocks, block_size), dtype=np.int64)

    def copy_block_head(self, src: int, dst: int, num_tokens: int) -> None:
        assert src != dst
        self.data[dst, :num_tokens] = self.data[src, :num_tokens]

    def touch(self, block_id: int) -> None:
        self.data[block_id] = self.data[block_id]

    def compute(self, lease: Lease, start: int, end: int) -> None:
        """Write the KV of tokens [start, end) of a lease, as a step would."""
        values = expected_kv(lease.namespace, lease.tokens[:end])
        for position in range(start, end):
            block = lease.block_table[position // self.block_size]
            self.data[block, position % self.block_size] = values[position]

    def verify(self, lease: Lease, num_tokens: int) -> None:
        """Check that the leading tokens of a lease have the KV they should have."""
        values = expected_kv(lease.namespace, lease.tokens[:num_tokens])
        for position, value in enumerate(values):
            block = lease.block_table[position // self.block_size]
            assert self.data[block, position % self.block_size] == value, f"wrong KV at {position}"
