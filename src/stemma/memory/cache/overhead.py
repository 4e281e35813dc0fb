"""What the prefix cache takes of host memory beside the blocks themselves; roughly, and never too little."""

from __future__ import annotations

from stemma.prefix.eviction.registry import make_policy

_RECORD_BYTES = 90
_GHOST_BYTES = 4 * 300
"""Four ghosts for each block, in dicts."""
_INDEX_BYTES = 200
"""Nodes, ids, states, references."""
_TOKEN_BYTES = 8
"""Of each token in the index; its arrays grow by doubling."""


def fixed_bytes(eviction: str) -> int:
    """Return what the policy of the device tier takes however many blocks there are."""
    return make_policy(eviction).reserved_bytes(0)


def bytes_per_block(block_size: int, eviction: str) -> int:
    """Return what each device block takes beside its KV."""
    policy = make_policy(eviction)
    ranked = policy.reserved_bytes(1) - policy.reserved_bytes(0)
    return _RECORD_BYTES + _GHOST_BYTES + _INDEX_BYTES + _TOKEN_BYTES * block_size + ranked
