"""Host memory of the prefix cache's own tables, without the blocks: an upper estimate."""

from __future__ import annotations

from stemma.prefix.eviction.registry import make_policy

_RECORD_BYTES = 110
_GHOST_BYTES = 4 * 300
"""Four ghosts for each block, in dicts."""
_INDEX_BYTES = 200
"""Nodes, ids, states, references."""
_MANY_BLOCKS = 1 << 20
_TOKEN_BYTES = 8
"""Bytes per token in the index; its arrays grow by doubling."""


def fixed_bytes(eviction: str) -> int:
    """Return the bytes that the device tier's policy takes regardless of the number of blocks."""
    return make_policy(eviction).reserved_bytes(_MANY_BLOCKS) - _MANY_BLOCKS * _ranked_bytes(eviction)


def bytes_per_block(block_size: int, eviction: str) -> int:
    """Return the bytes that each device block takes in addition to its KV."""
    ranked = _ranked_bytes(eviction)
    return _RECORD_BYTES + _GHOST_BYTES + _INDEX_BYTES + _TOKEN_BYTES * block_size + ranked


def _ranked_bytes(eviction: str) -> int:
    """Return what the policy takes for one block more, where there are many: what it remembers is bounded."""
    policy = make_policy(eviction)
    return policy.reserved_bytes(_MANY_BLOCKS + 1) - policy.reserved_bytes(_MANY_BLOCKS)
