"""Rendezvous hashing (Thaler and Ravishankar, 1998): each beginning of a prompt has its order of servers.

The beginning is hashed with each server's number, and the highest hash comes first. So a conversation stays
where its blocks are, no state is kept, and adding or removing a server moves only its own share.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

OVERLOADED_BY = 4
"""Requests that a server may have beyond twice those of the least busy one before others are preferred."""


def rendezvous_order(head: bytes, numbers: Sequence[int]) -> list[int]:
    """Return the places of `numbers`, which tell servers apart, best first for prompts that begin so."""
    scores = [xxhash.xxh3_64_intdigest(head, seed=number) for number in numbers]
    return sorted(range(len(numbers)), key=scores.__getitem__, reverse=True)
