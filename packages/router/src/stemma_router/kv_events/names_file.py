"""Names of blocks and checkpoints on disk, in a file beside them, for the process that opens the disk again.

A checkpoint has a record for each of its pieces, one after the other. A record that is missing or damaged
means that routers don't know of that block or checkpoint, never that they believe in one that isn't there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stemma.types import BlockKey

_log = logging.getLogger(__name__)

_HEADER = b"stemma block names 2\n"
_RECORD = np.dtype([("key", "V32"), ("name", "<u8"), ("number", "<u4"), ("count", "<u4"), ("check", "<u4")])
"""`count`: pieces of the checkpoint, of which this is the one with this number, from 0; 0 of a block."""

Pieces = tuple[BlockKey, ...]


@dataclass(slots=True)
class Names:
    """What routers call the blocks and checkpoints of a disk."""

    blocks: Mapping[BlockKey, int] = field(default_factory=dict)
    checkpoints: Sequence[tuple[Pieces, int]] = ()

    @property
    def num_records(self) -> int:
        """Records that they take in the file."""
        return len(self.blocks) + sum(len(pieces) for pieces, _ in self.checkpoints)


class NamesFile:
    """A file of names that grows until it is written anew. A failure ends its use, not the server."""

    def __init__(self, path: Path) -> None:
        self.num_records = 0
        self._path = path
        self._is_usable = True

    def read(self) -> Names:
        """Return what all intact records say."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return Names()
        if not data.startswith(_HEADER):
            return Names()
        body = data[len(_HEADER) :]
        records = np.frombuffer(body[: len(body) // _RECORD.itemsize * _RECORD.itemsize], dtype=_RECORD)
        records = records[records["check"] == _checks(records)]
        self.num_records = len(records)
        blocks = records[records["count"] == 0]
        named = zip(map(BlockKey, blocks["key"].tolist()), blocks["name"].tolist(), strict=True)
        return Names(dict(named), _checkpoints_of(records[records["count"] != 0]))

    def append(self, names: Names) -> None:
        """Add records of blocks at the file's end."""
        count = names.num_records
        if count and self._is_usable:
            is_new = self.num_records == 0
            self._put("wb" if is_new else "ab", self._path, _packed(names), is_new)
            self.num_records += count

    def write(self, names: Names) -> None:
        """Let the file hold these records and no others; a crash leaves it as it was."""
        draft = self._path.with_suffix(".draft")
        if self._is_usable and self._put("wb", draft, _packed(names), True):
            try:
                draft.replace(self._path)
            except OSError as error:
                self._fail(error)
            self.num_records = names.num_records

    def close(self) -> None:
        """Use it no more."""
        self._is_usable = False

    def _put(self, mode: str, path: Path, data: bytes, with_header: bool) -> bool:
        try:
            with path.open(mode) as file:
                file.write(_HEADER + data if with_header else data)
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: OSError) -> None:
        self._is_usable = False
        _log.warning("routers won't know after a restart what lies on disk: %s: %s", self._path, error)


def _checkpoints_of(records: npt.NDArray[np.void]) -> list[tuple[Pieces, int]]:
    """Return the checkpoints of which all pieces are there, in order and under one name."""
    found: dict[Pieces, int] = {}
    pieces: list[BlockKey] = []
    last: tuple[int, int, int] | None = None
    columns = (records[name].tolist() for name in ("key", "name", "number", "count"))
    for key, name, number, count in zip(*columns, strict=True):
        if last != (name, number - 1, count):
            pieces = []
        pieces.append(BlockKey(key))
        last = (name, number, count)
        if len(pieces) == count and number == count - 1:
            found[tuple(pieces)] = name
    return list(found.items())


def _packed(names: Names) -> bytes:
    rows = [(key, name, 0, 0) for key, name in names.blocks.items()]
    rows += _pieces_of(names.checkpoints)
    records = np.zeros(len(rows), dtype=_RECORD)
    for row, values in zip(("key", "name", "number", "count"), zip(*rows, strict=True), strict=False):
        records[row] = np.array(values, dtype=_RECORD[row])
    records["check"] = _checks(records)
    return records.tobytes()


def _pieces_of(checkpoints: Iterable[tuple[Pieces, int]]) -> Iterable[tuple[BlockKey, int, int, int]]:
    for pieces, name in checkpoints:
        for number, piece in enumerate(pieces):
            yield piece, name, number, len(pieces)


def _checks(records: npt.NDArray[np.void]) -> npt.NDArray[np.uint32]:
    """Return a checksum of each record: its words, multiplied and folded."""
    place = records["number"].astype(np.uint64) << np.uint64(32) | records["count"].astype(np.uint64)
    folded = records["name"] ^ place * np.uint64(0xBF58476D1CE4E5B9)
    words = np.ascontiguousarray(records["key"]).view("<u8").reshape(-1, 4)
    for column in words.T:
        folded = (folded ^ column) * np.uint64(0x9E3779B97F4A7C15)
    checks: npt.NDArray[np.uint32] = (folded >> np.uint64(32)).astype(np.uint32)
    return checks
