"""Which prompts other models left in the disk directory, so that a miss after a change of model is explained.

Only the index files of other sub-directories are read, once, when the server starts. Kept are the first 8
bytes of each key: a collision could only give a wrong explanation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stemma.errors import StorageError
from stemma.memory.tiers.disk.existing import space_of, unreadable
from stemma.memory.tiers.disk.record import RECORD_BYTES, RECORD_DTYPE, sound_records
from stemma.memory.tiers.disk.spaces import INDEX, Manifest, list_spaces
from stemma.prefix.keys import KeySpace, Namespace
from stemma.types import BlockKey, Fingerprints, TokenArray

MAX_SPACES = 4
"""Sub-directories read: those used last."""
MAX_INDEX_BYTES = 32 * 2**20
"""Read of each index: a quarter of a million blocks, 2 MiB here."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Other:
    space: KeySpace
    difference: str
    prints: Fingerprints
    """Sorted."""

    def num_tokens(self, namespace: Namespace, tokens: TokenArray) -> int:
        """Return how many leading tokens of full blocks are there."""
        roots = self.space.roots(namespace)
        keys: list[BlockKey] = [roots.first]
        size, num_blocks = self.space.block_size, 0
        for start in range(0, len(tokens) - size + 1, size):
            keys += roots.extend(start // size, keys[-1], tokens[start : start + size])
            wanted = np.frombuffer(keys[-1][:8], dtype="<u8")[0]
            at = int(np.searchsorted(self.prints, wanted))
            if at == len(self.prints) or self.prints[at] != wanted:
                break
            num_blocks += 1
        return num_blocks * size


class OtherModelsOnDisk:
    """Prompts in the sub-directories of `root` other than the one of `own`. Any thread; nothing changes."""

    def __init__(self, root: Path, own: KeySpace) -> None:
        """Read the indexes of the others. One that can't be read is left out."""
        self._others: list[_Other] = []
        self.unread: list[str] = []
        """What another version or other settings left of this very model, for people: it can't be read."""
        try:
            spaces = list_spaces(root)
        except StorageError as error:
            logger.info("explanations don't know other models: %s", error)
            return
        for space in reversed(spaces):
            if (reason := unreadable(space)) is not None:
                self.unread.append(f"{space.path} {reason}")
                continue
            if space.manifest is None or space_of(space.manifest) == own or len(self._others) == MAX_SPACES:
                continue
            prints = _read_prints(space.path / INDEX, space.manifest.block_bytes)
            if len(prints):
                difference = _difference(space.manifest, own)
                self._others.append(_Other(space_of(space.manifest), difference, prints))
                if space.manifest.model_fingerprint == own.model_fingerprint:
                    self.unread.append(f"{len(prints)} blocks in {space.path}: written {difference}")

        for found in self.unread:
            logger.warning("not read from the disk cache: %s", found)

    def find(self, namespace: Namespace, tokens: TokenArray) -> tuple[int, str] | None:
        """Return what other models hold of a prompt. Hashes a block for each other model, more where it is
        there."""
        best = max(self._others, key=lambda one: one.num_tokens(namespace, tokens), default=None)
        num_tokens = 0 if best is None else best.num_tokens(namespace, tokens)
        return (num_tokens, best.difference) if best is not None and num_tokens else None


def _read_prints(index: Path, block_bytes: int) -> Fingerprints:
    try:
        with index.open("rb") as file:
            raw = file.read(MAX_INDEX_BYTES)
    except OSError:
        raw = b""
    whole = memoryview(raw)[: len(raw) // RECORD_BYTES * RECORD_BYTES]
    table = np.frombuffer(whole, dtype=RECORD_DTYPE)[sound_records(whole, 0, block_bytes)]
    keys = np.frombuffer(table["key"].tobytes(), dtype=np.uint8).reshape(-1, 32)
    prints: Fingerprints = np.sort(keys[:, :8].copy().view("<u8")[:, 0]).astype(np.uint64)
    return prints


def _difference(manifest: Manifest, own: KeySpace) -> str:
    if manifest.model_fingerprint != own.model_fingerprint:
        return f"by another model (its fingerprint begins {manifest.model_fingerprint[:12]})"
    if manifest.block_size != own.block_size:
        return f"with blocks of {manifest.block_size} tokens, now {own.block_size}"
    return f"as {manifest.kv_layout}, now {own.kv_layout}"
