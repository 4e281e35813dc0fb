"""How routers name blocks: each by a hash of its tokens over the name of the block before it.

Servers name blocks by hashes of their own, which bind model and tenant. A router sees token ids only, so it
needs names that follow from them, and from an adapter's name.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from stemma.types import TokenArray

_WORD = (1 << 64) - 1
CHECKPOINT = 0x5EED_C4EC_4B01_47A7
"""XOR of the name of a checkpoint and that of the block whose last token it stands behind."""


def chain_of(tokens: TokenArray, block_size: int, parent: int = 0) -> list[int]:
    """Return the names of the full blocks of `tokens` [n] int32, each hashed over its predecessor."""
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    width = 4 * block_size
    chain = []
    for start in range(0, len(data) - width + 1, width):
        parent = xxhash.xxh3_64_intdigest(data[start : start + width], seed=parent)
        chain.append(parent)
    return chain


def told_words(hashes: Iterable[bytes | int]) -> npt.NDArray[np.uint64]:
    """Return 64 bits of each of a server's own hashes, [n]: of bytes a hash, of integers the lowest."""
    words = [one & _WORD if isinstance(one, int) else xxhash.xxh3_64_intdigest(one) for one in hashes]
    return np.array(words, dtype=np.uint64)
