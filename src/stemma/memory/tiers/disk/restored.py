"""What a restart knows from the index file: a million blocks in about a second, so mostly in numpy.

Keys are SHA-256 digests, so their first 8 bytes nearly always tell them apart; where they don't, whole
keys decide. A parent that is held too shares the `bytes` object of its own key: less to hash, less memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.types import BlockKey

Records = npt.NDArray[np.void]
"""Of `record.RECORD_DTYPE`."""
Words = npt.NDArray[np.uint64]
"""[n, 4]: keys as little-endian words."""


@dataclass(frozen=True, slots=True)
class RestoredBlocks:
    """Blocks with unique keys: most recently used first, and of equals the ones written first."""

    slots: npt.NDArray[np.int64]
    records: Records
    keys: list[BlockKey]
    parents: list[BlockKey]
    parent_at: npt.NDArray[np.int64]
    """By block: where its parent stands in this list, or -1."""


def restored_blocks(slots: npt.NDArray[np.int64], records: Records) -> RestoredBlocks:
    """Order the sound records of these slots. Of two records of one key the younger one wins."""
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
    """One key in two slots: a crash came between a drop and its record. Keep the younger one, in order."""
    keys = records["key"].tolist()
    youngest: dict[bytes, int] = {}
    for n in np.argsort(records["generation"], kind="stable").tolist():
        youngest[keys[n]] = n
    return np.array(sorted(youngest.values()), dtype=np.int64)


def _positions(keys: Words, wanted: Words) -> npt.NDArray[np.int64]:
    """Return where each of `wanted` stands among the unique `keys`, or -1."""
    found = np.full(len(wanted), -1, dtype=np.int64)
    if not len(keys):
        return found
    order = np.argsort(keys[:, 0])
    firsts = keys[order, 0]
    if _has_equal(firsts):
        at = {row.tobytes(): n for n, row in enumerate(keys)}
        return np.array([at.get(row.tobytes(), -1) for row in wanted], dtype=np.int64)
    # In sorted order the search walks through memory instead of jumping.
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
