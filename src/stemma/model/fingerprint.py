"""A name for the content of a checkpoint, so that KV of one model is never used for another.

SHA-256 over the fields of config.json that matter and over every safetensors file, in order of names: its
name, size, header, and its content. Content of up to `FULL_HASH_BYTES` in all is hashed whole. Of larger
checkpoints, `SAMPLE_BYTES` are hashed at each multiple of `SAMPLE_STRIDE` and at the end of each file: 0.4 %
of the bytes, in every tensor of more than a megabyte. Training moves nearly all values of a tensor, so other
weights differ in some sample; a hand-made edit of a single value in a large checkpoint may not be noticed.
The same files give the same fingerprint on every machine.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from pathlib import Path
from typing import Any

from stemma.errors import ModelError

FULL_HASH_BYTES = 1 << 28
SAMPLE_STRIDE = 1 << 20
SAMPLE_BYTES = 1 << 12
_CHUNK_BYTES = 1 << 22

_IGNORED_FIELDS = ("_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype")
"""Fields of config.json that don't change KV; the dtype in use is part of the block keys' layout."""


def model_fingerprint(path: Path) -> str:
    """Return 64 hexadecimal digits naming config and weights in `path`; raise ModelError if unreadable."""
    digest = hashlib.sha256()
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        essentials = {name: value for name, value in config.items() if name not in _IGNORED_FIELDS}
        _update(digest, json.dumps(essentials, sort_keys=True, separators=(",", ":")).encode())
        files = sorted(path.glob("*.safetensors"))
        total_bytes = sum(file.stat().st_size for file in files)
        for file in files:
            _update(digest, file.name.encode())
            _update_file(digest, file, whole=total_bytes <= FULL_HASH_BYTES)
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read the checkpoint in {path}: {error}") from error
    return digest.hexdigest()


def _update(digest: hashlib._Hash, field: bytes) -> None:
    digest.update(struct.pack("<Q", len(field)))
    digest.update(field)


def _update_file(digest: hashlib._Hash, file: Path, *, whole: bool) -> None:
    size = file.stat().st_size
    digest.update(struct.pack("<Q", size))
    if size == 0:
        return
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if whole:
            for start in range(0, size, _CHUNK_BYTES):
                digest.update(data[start : start + _CHUNK_BYTES])
            return
        header_bytes = min(size, 8 + struct.unpack("<Q", data[:8])[0])
        digest.update(data[:header_bytes])
        for start in (*range(header_bytes, size, SAMPLE_STRIDE), max(0, size - SAMPLE_BYTES)):
            digest.update(data[start : start + SAMPLE_BYTES])
