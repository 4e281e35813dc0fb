"""A name for the content of a checkpoint, so that KV of one model is never used for another.

It is a SHA-256 of the fields of config.json (of a GGUF file, its metadata) that affect KV, the checkpoint's
own Python files if they run, and all tensors in order of names: name, dtype, shape, content. The split into
files doesn't matter. Tensors are hashed whole, smallest first, until `WHOLE_BYTES` in total are reached: this
covers every bias and norm of any model, and all of a small checkpoint. In larger tensors, `SAMPLE_BYTES` are
hashed at each multiple of `SAMPLE_STRIDE`, in the middle and at the end. Training changes nearly all values
of a tensor, so other weights differ in some sample; a manual edit of a few values in a large tensor may go
unnoticed. The same files give the same fingerprint on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from stemma.errors import ModelError
from stemma.model.files.directory import (
    CONFIG,
    FileStates,
    StoredTensor,
    checkpoint_states,
    description_file,
    is_gguf,
    read_json,
    stored_tensors,
)
from stemma.supervision import Supervisor, start_thread

_FORMAT = b"stemma fingerprint 2"
"""Version of the method; changes with what is hashed, and how."""
WHOLE_BYTES = 1 << 28
SAMPLE_STRIDE = 1 << 20
SAMPLE_BYTES = 1 << 12
_CHUNK_BYTES = 1 << 22

_IGNORED_FIELDS = ("_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype")
"""Fields of config.json that don't change KV; the dtype in use is part of the block keys' layout."""


def model_fingerprint(path: Path, *, remote_code: bool = False, whole_bytes: int = WHOLE_BYTES) -> str:
    """Return 64 hexadecimal digits naming config and weights in `path`; raise ModelError if unreadable.

    With `remote_code`, the checkpoint's own Python files are hashed too. `whole_bytes` limits what is hashed
    in addition to samples.
    """
    digest = hashlib.sha256(_FORMAT)
    essentials = _essentials(path)
    tensors = stored_tensors(path)
    largest_whole = _largest_whole(tensors, whole_bytes)
    try:
        _update(digest, json.dumps(essentials, sort_keys=True, separators=(",", ":")).encode())
        for source in sorted(path.rglob("*.py")) if remote_code else ():
            _update(digest, source.relative_to(path).as_posix().encode())
            _update(digest, source.read_bytes())
        # In order of names; adjacent tensors of one file share one open.
        for file, group in groupby(tensors, key=lambda tensor: tensor.file):
            _update_tensors(digest, file, group, largest_whole)
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read the checkpoint in {path}: {error}") from error
    return digest.hexdigest()


class EarlyFingerprint:
    """The fingerprint of a checkpoint without code of its own, read beside the interpreter's imports."""

    def __init__(self, path: Path, after: Callable[[], None], supervisor: Supervisor) -> None:
        """Begin once `after` returns, which the thread calls."""
        self._path, self._after = path, after
        self._found: tuple[FileStates, str] | None = None
        self._thread = start_thread("stemma-fingerprint", self._run, supervisor)

    def take(self, path: Path) -> str | None:
        """Wait, and return the fingerprint if it is that of the files that `path` has now, else None."""
        self._thread.join()
        if self._found is None or path != self._path or self._found[0] != checkpoint_states(path):
            return None
        return self._found[1]

    def _run(self) -> None:
        self._after()
        with suppress(ModelError, OSError):  # the load meets it again, and says what it is
            states = checkpoint_states(self._path)
            self._found = states, model_fingerprint(self._path)


def _essentials(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says of its model, but for names, versions and its tokenizer."""
    if not is_gguf(path):
        config = read_json(path / CONFIG)
        essentials = {name: value for name, value in config.items() if name not in _IGNORED_FIELDS}
        described = description_file(path)
        return essentials if described is None else essentials | {"described": read_json(described)}
    from stemma.model.files.gguf_header import read_header

    header = read_header(path)
    own = (header.architecture + ".", "general.architecture")
    return {"gguf": {name: value for name, value in header.metadata.items() if name.startswith(own)}}


def _largest_whole(tensors: Iterable[StoredTensor], whole_bytes: int) -> int:
    """Return the largest size up to which all tensors together take at most `whole_bytes`."""
    largest, total = 0, 0
    for size, group in groupby(sorted(tensor.num_bytes for tensor in tensors)):
        total += size * len(list(group))
        if total > whole_bytes:
            break
        largest = size
    return largest


def _update(digest: hashlib._Hash, field: bytes) -> None:
    digest.update(struct.pack("<Q", len(field)))
    digest.update(field)


def _update_tensors(
    digest: hashlib._Hash, file: Path, tensors: Iterable[StoredTensor], largest_whole: int
) -> None:
    with file.open("rb", buffering=0) as stream:
        for tensor in tensors:
            _update(digest, tensor.name.encode())
            _update(digest, f"{tensor.dtype} {list(tensor.shape)}".encode())
            for start, stop in _parts(tensor, largest_whole):
                # Read, not mapped: a fault in a mapping reads 128 KB around a sample of 4.
                digest.update(os.pread(stream.fileno(), stop - start, start))


def _parts(tensor: StoredTensor, largest_whole: int) -> Iterator[tuple[int, int]]:
    """Return the half-open ranges of a tensor's file that are hashed."""
    end = tensor.start + tensor.num_bytes
    if tensor.num_bytes <= largest_whole:
        starts: Iterable[int] = range(tensor.start, end, _CHUNK_BYTES)
        length = _CHUNK_BYTES
    else:
        middle, last = tensor.start + tensor.num_bytes // 2, max(tensor.start, end - SAMPLE_BYTES)
        starts = (*range(tensor.start, end, SAMPLE_STRIDE), middle, last)
        length = SAMPLE_BYTES
    return ((start, min(end, start + length)) for start in starts)
