"""A GGUF file taken apart into its header's fields, and put together again as told, true or not.

The `gguf` package writes only files that are right.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Any

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
ALIGNMENT = 32


@dataclass(frozen=True)
class Array:
    """An array as a file says it is; `count`: what it says of its length, by default the truth."""

    kind: int
    values: tuple[Any, ...]
    count: int | None = None


@dataclass(frozen=True)
class Value:
    """A value of a type; `value` is a number, bytes or an `Array`."""

    kind: int
    value: Any
    length: int | None = None
    """What a string says of its length, by default the truth."""


@dataclass(frozen=True)
class Entry:
    """What a header says of a tensor; dimensions in ggml's order."""

    name: bytes
    dimensions: tuple[int, ...]
    kind: int
    offset: int
    num_dimensions: int | None = None


@dataclass(frozen=True)
class Parts:
    """All of a file."""

    fields: tuple[tuple[bytes, Value], ...] = field(repr=False)
    entries: tuple[Entry, ...] = field(repr=False)
    data: bytes = field(repr=False)
    version: int = 3
    num_fields: int | None = None
    """What the header counts, by default the truth."""
    num_entries: int | None = None
    changes: tuple[str, ...] = ()
    """What was changed, in words, for a failing test."""

    def with_field(self, name: str, value: Value) -> Parts:
        """Return it with another value of a field, which is added if it isn't there."""
        key = name.encode()
        others = tuple(each for each in self.fields if each[0] != key)
        return replace(self, fields=(*others, (key, value)))


def split(content: bytes) -> Parts:
    """Take a file that is right apart."""
    reader = _Reader(content)
    assert reader.take(4) == MAGIC
    version, num_entries, num_fields = reader.numbers("IQQ")
    fields = tuple((reader.text(), reader.value()) for _ in range(num_fields))
    entries = []
    for _ in range(num_entries):
        name = reader.text()
        (num_dimensions,) = reader.numbers("I")
        dimensions = reader.numbers(f"{num_dimensions}Q")
        entries.append(Entry(name, dimensions, *reader.numbers("IQ")))
    begin = -(-reader.position // ALIGNMENT) * ALIGNMENT
    return Parts(fields, tuple(entries), content[begin:], version)


def join(parts: Parts) -> bytes:
    """Put a file together, whatever its parts say."""
    num_entries = len(parts.entries) if parts.num_entries is None else parts.num_entries
    num_fields = len(parts.fields) if parts.num_fields is None else parts.num_fields
    found = [MAGIC, struct.pack("<IQQ", parts.version, num_entries, num_fields)]
    for name, value in parts.fields:
        found += [_text(name), struct.pack("<I", value.kind), _value(value)]
    for entry in parts.entries:
        count = len(entry.dimensions) if entry.num_dimensions is None else entry.num_dimensions
        found += [_text(entry.name), struct.pack("<I", count)]
        found += [struct.pack(f"<{len(entry.dimensions)}Q", *entry.dimensions)]
        found += [struct.pack("<IQ", entry.kind, entry.offset)]
    header = b"".join(found)
    return header + bytes(-len(header) % ALIGNMENT) + parts.data


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        self.position += num_bytes
        return self._content[self.position - num_bytes : self.position]

    def numbers(self, codes: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{codes}", self.take(struct.calcsize(f"<{codes}")))

    def text(self) -> bytes:
        return self.take(*self.numbers("Q"))

    def value(self) -> Value:
        (kind,) = self.numbers("I")
        if kind == STRING:
            return Value(kind, self.text())
        if kind in FORMATS:
            return Value(kind, *self.numbers(FORMATS[kind]))
        assert kind == ARRAY
        element, count = self.numbers("IQ")
        if element == STRING:
            return Value(kind, Array(element, tuple(self.text() for _ in range(count))))
        return Value(kind, Array(element, self.numbers(f"{count}{FORMATS[element]}")))


def _text(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def _value(value: Value) -> bytes:
    if isinstance(value.value, Array):
        array = value.value
        count = len(array.values) if array.count is None else array.count
        inner = (
            _value(each if isinstance(each, Value) else Value(array.kind, each)) for each in array.values
        )
        return struct.pack("<IQ", array.kind, count) + b"".join(inner)
    if isinstance(value.value, bytes):
        return _text(value.value, value.length)
    return struct.pack(f"<{FORMATS[value.kind]}", value.value)
