"""The header of a GGUF file: metadata and where each tensor lies, every count and offset checked.

The `gguf` package's own reader believes what a file says: a count of 2^60 keeps it busy until memory ends,
and a vocabulary takes it seconds. This one reads the format (version 2 and 3, little-endian) as ggml
documents it in `docs/gguf.md`, never further than the file, and takes the table of types from the package.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from stemma.errors import ModelError
from stemma.model.files.gguf_keys import shown
from stemma.model.files.gguf_parts import part_files

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata types of fixed size, in the words of `struct`."""
_DEFAULT_ALIGNMENT = 32
_MAX_FIELDS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_DIMENSIONS = 4
MAX_ELEMENTS = 1 << 22
"""Elements of all arrays: the largest vocabularies have a quarter of a million tokens, twice the merges."""
_MAX_NAME_BYTES = 1 << 16
_MAX_TENSOR_NAME_BYTES = 256
"""Four times what ggml allows."""
MAX_METADATA_BYTES = 1 << 28
"""Ten times the metadata of the largest vocabularies. Python's objects take several times as much."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor as a GGUF file holds it."""

    file: Path
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """In torch's order: the last dimension is contiguous."""
    start: int
    """Offset in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata and tensors of a GGUF file, or of all parts of a model in several."""

    path: Path
    """As the user gave it."""
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family, e.g. ``qwen3moe``."""
        return str(self.metadata["general.architecture"])


class _Kept:
    """Headers by file, while somebody wants them kept. A vocabulary takes tenths of a second to read."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_keepers = 0
        self.headers: dict[tuple[Path, tuple[tuple[int, int, int], ...]], GGUFHeader] = {}


_kept = _Kept()


@contextmanager
def headers_kept() -> Iterator[None]:
    """Let `read_header` read each file once meanwhile, in all threads. Readers don't change what they get."""
    with _kept.lock:
        _kept.num_keepers += 1
    try:
        yield
    finally:
        with _kept.lock:
            _kept.num_keepers -= 1
            if not _kept.num_keepers:
                _kept.headers.clear()


def read_header(path: Path) -> GGUFHeader:
    """Return metadata and tensors of a GGUF file, and of the other parts of its model if there are any.

    Raises ModelError if a file can't be read, is cut short, contradicts itself or the others, or is lacking.
    """
    if not _kept.num_keepers:
        return _read(path)
    try:
        found = [file.stat() for file in part_files(path)]
    except OSError:
        return _read(path)
    key = (path, tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found))
    with _kept.lock:
        if key not in _kept.headers:
            _kept.headers[key] = _read(path)
        return _kept.headers[key]


def _read(path: Path) -> GGUFHeader:
    files = part_files(path)
    parts = [_read_file(file) for file in files]
    _check_parts(path, [each.metadata for each in parts])
    if type(parts[0].metadata.get("general.architecture")) is not str:
        raise ModelError(f"{files[0]} names no general.architecture; download it again")
    tensors: dict[str, GGUFTensor] = {}
    for part in parts:
        if twice := part.tensors.keys() & tensors.keys():
            raise ModelError(f"{part.path} has the tensor {min(twice)}, as another part does")
        tensors |= part.tensors
    num_tensors = parts[0].metadata.get("split.tensors.count", len(tensors))
    if num_tensors != len(tensors):
        raise ModelError(f"{path}: its parts hold {len(tensors)} tensors and tell of {shown(num_tensors)}")
    return parts[0] if len(parts) == 1 else GGUFHeader(path, parts[0].metadata, tensors)


def _check_parts(path: Path, metadata: Sequence[dict[str, Any]]) -> None:
    """Raise ModelError unless each file says that it is the part that its name says."""
    for number, each in enumerate(metadata):
        told = each.get("split.count", 1), each.get("split.no", 0)
        if told != (len(metadata), number) and (len(metadata) > 1 or told[0] not in (0, 1)):
            raise ModelError(
                f"part {number + 1} of {len(metadata)} of {path} says that it is one of {shown(told[0])} "
                f"parts, {shown(told[1])} before it; give the files the names that they were downloaded with"
            )


def _read_file(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (OSError, ValueError, struct.error, OverflowError) as error:
        raise ModelError(f"can't read {path} as GGUF: {error}; download it again") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(data)
    if cursor.take(len(_MAGIC)) != _MAGIC:
        raise ValueError("it doesn't begin with GGUF")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, readable are {' and '.join(map(str, _VERSIONS))}")
    num_tensors = _checked("tensors", cursor.number("Q"), _MAX_TENSORS)
    num_fields = _checked("metadata fields", cursor.number("Q"), _MAX_FIELDS)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"{shown(key)} is there twice")
        try:
            metadata[key] = _value(cursor, cursor.number("I"))
        except (ValueError, struct.error) as error:
            raise ValueError(f"{shown(key)}: {error}") from error
        if cursor.position > MAX_METADATA_BYTES:
            raise ValueError(f"its metadata take more than {MAX_METADATA_BYTES} bytes")
    entries = {}
    for name, *entry in _entries(cursor, num_tensors):
        if name in entries:
            raise ValueError(f"tensor {name} is there twice")
        entries[name] = entry
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, must be a power of two")
    origin = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _tensor(path, name, *entry, origin=origin, file_bytes=len(data))
        for name, entry in entries.items()
    }
    _check_apart(tensors.values())
    return GGUFHeader(path, metadata, tensors)


def _check_apart(tensors: Iterable[GGUFTensor]) -> None:
    """Raise ValueError if tensors share bytes: a small file could make a model of any size."""
    ordered = sorted(tensors, key=lambda tensor: tensor.start)
    for one, other in pairwise(ordered):
        if one.start + one.num_bytes > other.start:
            raise ValueError(f"its tensors {one.name} and {other.name} overlap")


class _Cursor:
    """Reads from a position on; raises ValueError at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0
        self.num_elements = 0
        """Of all arrays so far."""

    def take(self, num_bytes: int) -> bytes:
        stop = self.position + num_bytes
        if stop > len(self._data):
            raise ValueError("it is cut short")
        taken = self._data[self.position : stop]
        self.position = stop
        return taken

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(struct.calcsize(f"<{code}") * count))

    def texts(self, count: int) -> list[str]:
        """Vocabularies: hundreds of thousands of short strings."""
        data, position, end = self._data, self.position, len(self._data)
        length_at, found = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            (length,) = length_at(data, position)
            position += 8
            if length > min(end - position, _MAX_NAME_BYTES):
                raise ValueError("it is cut short, or has a string that is too long")
            found.append(data[position : position + length].decode("utf-8"))
            position += length
        self.position = position
        return found

    def text(self, limit: int = _MAX_NAME_BYTES) -> str:
        return self.take(_checked("bytes of a name", self.number("Q"), limit)).decode("utf-8")


def _checked(what: str, number: int, limit: int) -> int:
    if number > limit:
        raise ValueError(f"it counts {number} {what}, more than {limit}")
    return number


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind in _FORMATS:
        return cursor.number(_FORMATS[kind])
    if kind == _STRING:
        return cursor.text(limit=1 << 24)
    if kind != _ARRAY:
        raise ValueError(f"metadata of type {kind} are unknown")
    element, count = cursor.number("I"), _checked("elements of an array", cursor.number("Q"), MAX_ELEMENTS)
    cursor.num_elements += count
    _checked("elements of arrays", cursor.num_elements, MAX_ELEMENTS)
    if element in _FORMATS:
        return list(cursor.numbers(_FORMATS[element], count))
    if element != _STRING:
        raise ValueError(f"metadata hold an array of type {element}, which isn't read")
    return cursor.texts(count)


def _entries(cursor: _Cursor, count: int) -> Iterator[tuple[Any, ...]]:
    for _ in range(count):
        name = cursor.text(limit=_MAX_TENSOR_NAME_BYTES)
        num_dimensions = _checked("dimensions of a tensor", cursor.number("I"), _MAX_DIMENSIONS)
        shape = tuple(reversed(cursor.numbers("Q", num_dimensions)))
        yield name, shape, cursor.number("I"), cursor.number("Q")


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, *, origin: int, file_bytes: int
) -> GGUFTensor:
    try:
        type_ = GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"tensor {name} has the unknown type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[type_]
    if not shape or 0 in shape or shape[-1] % block:
        raise ValueError(f"tensor {name} of shape {list(shape)} can't be {type_.name}")
    num_bytes = prod(shape) // block * block_bytes
    if origin + offset + num_bytes > file_bytes:
        raise ValueError(f"it ends before its tensor {name}")
    return GGUFTensor(path, name, type_, shape, origin + offset, num_bytes)
