"""Names of blocks in a pool: ``{block key as hex}_{tp_rank}_{tp_size}_{model}``.

The block key already binds everything that KV depends on (`prefix/keys.py`). Rank and size say which part of
a block a value holds: one process has the whole (rank 0 of 1); the model's name is for people who look into
the pool. No two blocks share a name: the first three fields are hex digits and decimal numbers without ``_``,
so the first three ``_`` always end them, and the last field is an injective encoding of the model's name
(long names: a SHA-256).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import quote

from stemma.types import BlockKey

_MAX_MODEL_CHARS = 64
_NAME = re.compile(r"[0-9a-f]{64}_[0-9]+_[0-9]+_[A-Za-z0-9.~%-]+")


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """Names of the blocks of one tensor-parallel rank."""

    model: str
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"tp_rank {self.tp_rank} is not below tp_size {self.tp_size}")

    def own(self, key: BlockKey) -> str:
        """Return the name of this rank's part of a block."""
        return f"{key.hex()}_{self.tp_rank}_{self.tp_size}_{_encoded(self.model)}"


def is_value_name(name: str) -> bool:
    """Return whether `PoolKeys` gives names of this form."""
    return _NAME.fullmatch(name) is not None


def _encoded(model: str) -> str:
    """Return the name with everything but ``[A-Za-z0-9.~-]`` percent-encoded, ``_`` included."""
    text = quote(model, safe="").replace("_", "%5F")
    if len(text) > _MAX_MODEL_CHARS:
        # 65 characters and the tilde in front keep digests apart from names that look like one.
        return "~" + hashlib.sha256(model.encode()).hexdigest()
    return text
