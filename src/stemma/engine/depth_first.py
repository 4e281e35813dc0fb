"""The order in which many prompts share most: depth first over the tree of their beginnings.

Sorted by their tokens, prompts come as a depth-first walk meets them in that tree. Each shared beginning is
then computed once with room for one path of the tree, which is the best that any order can do (SGLang, arXiv
2312.07104, theorem 3.1). SQLite sorts: it holds a few MB in memory and the rest in a file without a name.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import numpy as np

from stemma.types import TokenArray, as_tokens

_SORTED_AT_ONCE_KIB = 64 * 1024


def token_key(tokens: TokenArray) -> bytes:
    """Return bytes that sort as the tokens do, one after the other."""
    return np.asarray(tokens).astype(">u4").tobytes()


def tokens_of(key: bytes) -> TokenArray:
    """Return the tokens that `token_key` made `key` of."""
    return as_tokens(np.frombuffer(key, dtype=">u4"))


class DepthFirst:
    """Numbered prompts: added in any order, read depth first. For one thread at a time."""

    def __init__(self) -> None:
        # No name: the table lies in a file of its own that ends with this object.
        self._db = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._db.execute(f"PRAGMA cache_size = -{_SORTED_AT_ONCE_KIB}")
        self._db.execute("CREATE TABLE prompts (number INTEGER PRIMARY KEY, key BLOB NOT NULL)")
        self._db.execute("BEGIN")

    def add(self, number: int, tokens: TokenArray) -> None:
        """Take a prompt, whose tokens are copied."""
        self._db.execute("INSERT INTO prompts VALUES (?, ?)", (number, token_key(tokens)))

    def __iter__(self) -> Iterator[tuple[int, TokenArray]]:
        """Yield each prompt's number and tokens; equal ones in order of numbers."""
        for number, key in self._db.execute("SELECT number, key FROM prompts ORDER BY key, number"):
            yield number, tokens_of(key)

    def close(self) -> None:
        """Drop all prompts."""
        self._db.close()
