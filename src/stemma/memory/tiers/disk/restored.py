"""Restores blocks from the index file after a restart: a million blocks in about a second, mostly in numpy.

Keys are SHA-256 digests, so their first 8 bytes nearly always differ; if they don't, whole keys are compared.
A block whose parent is held too refers to the `bytes` object of the parent's key, which saves hashing and
memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.types import BlockKey

Records = npt.NDArray[np.void]
"""Array of `record.RECORD_DTYPE`."""
Words = npt.NDArray[np.uint64]
"""[n, 4]: keys as little-endian words."""


@dataclass(frozen=True, slots=True)
class RestoredBlocks:
    """Blocks with unique keys, most recently used first; ties in order of writing."""

    slots: npt.NDArray[np.int64]
    records: Records
    keys: list[BlockKey]
    parents: list[BlockKey]
    parent_at: npt.NDArray[np.int64]
    """By block: position of its parent in this list, or -1."""


def restored_blocks(slots: npt.NDArray[np.int64], records: Records) -> RestoredBlocks:
    """Order the intact records of these slots. Of two records with the same key the younger wins."""
    order = np.lexsort((records["generation"], -records["used_at"]))
    slots, records = slots[order], records[order]
    words = _words(records, "key")
    if _has_equal(np.sort(words[:, 0])):
        kept = _youngest(records)
        slots, records, words = slots[kept], records[kept], words[kept]
    keys: list[BlockKey] = records["key"].tolist()
    parent_at = _positions(words, _words(records, "parent"))
    return RestoredBlocks(slots, records, keys, _parents(records, keys, parent_at), parent_at)


def _words(records: Records, field: str) -> Words:
    return np.ascontiguousarray(records[field]).view("<u8").reshape(-1, 4)


def _has_equal(ordered: npt.NDArray[np.uint64]) -> bool:
    return bool((ordered[1:] == ordered[:-1]).any())


def _youngest(records: Records) -> npt.NDArray[np.int64]:
    """Keep the younger of two records with the same key (a crash between a drop and its record), in order."""
    keys = records["key"].tolist()
    youngest: dict[bytes, int] = {}
    for n in np.argsort(records["generation"], kind="stable").tolist():
        youngest[keys[n]] = n
    return np.array(sorted(youngest.values()), dtype=np.int64)


def _positions(keys: Words, wanted: Words) -> npt.NDArray[np.int64]:
    """Return the position of each of `wanted` in the unique `keys`, or -1."""
    found = np.full(len(wanted), -1, dtype=np.int64)
    if not len(keys):
        return found
    order = np.argsort(keys[:, 0])
    firsts = keys[order, 0]
    if _has_equal(firsts):
        at = {row.tobytes(): n for n, row in enumerate(keys)}
        return np.array([at.get(row.tobytes(), -1) for row in wanted], dtype=np.int64)
    # Sorted queries make the search read memory in order.
    asked = np.argsort(wanted[:, 0])
    near = order[np.minimum(np.searchsorted(firsts, wanted[asked, 0]), len(keys) - 1)]
    same = (keys[near] == wanted[asked]).all(axis=1)
    found[asked[same]] = near[same]
    return found


def _parents(records: Records, keys: list[BlockKey], parent_at: npt.NDArray[np.int64]) -> list[BlockKey]:
    parents = np.empty(len(keys), dtype=object)
    parents[:] = keys
    parents = parents[parent_at]
    absent = np.flatnonzero(parent_at < 0)
    parents[absent] = np.array([*records["parent"][absent].tolist(), None], dtype=object)[:-1]
    whole: list[BlockKey] = parents.tolist()
    return whole
