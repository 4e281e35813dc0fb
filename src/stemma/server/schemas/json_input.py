"""JSON from outside, bounded before anything is built from it.

A small body can hold millions of empty arrays, which take seconds and gigabytes to parse. So the bytes are
scanned first. Separators are counted with `bytes.count`; only if there are too many, those inside strings are
excluded, slice by slice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from stemma.errors import InvalidRequest
from stemma.server.schemas.bounds import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, MAX_JSON_VALUES

_SLICE_BYTES = 1 << 20


def parse_json(data: bytes, what: str = "the body", *, max_values: int = MAX_JSON_VALUES) -> Any:
    """Return the parsed value; raise InvalidRequest if it is no JSON, or too large or deep to be built."""
    check_counts(data, what, max_values)
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}") from error
    if depth_exceeds(parsed, MAX_JSON_DEPTH):
        raise InvalidRequest(f"{what} is nested more than {MAX_JSON_DEPTH} levels deep")
    return parsed


def max_values_of(max_model_len: int) -> int:
    """Return how many values a body may have: a prompt may be a context of token ids."""
    return max(MAX_JSON_VALUES, 2 * max_model_len)


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether objects and arrays are nested more than `limit` deep. Doesn't recurse."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for each in level
            if type(each) in (dict, list)
            for child in (each.values() if type(each) is dict else each)
            if type(child) in (dict, list)
        ]
        if not level:
            return False
    return True


def check_counts(data: bytes, what: str, max_values: int = MAX_JSON_VALUES) -> None:
    """Raise InvalidRequest if the JSON in `data` is too large to be built."""
    num_containers = data.count(b"[") + data.count(b"{")
    num_values = num_containers + data.count(b",") + data.count(b":")
    if num_containers > MAX_JSON_CONTAINERS or num_values > max_values:
        num_containers, num_values = _counts_outside_strings(data)
    if num_containers > MAX_JSON_CONTAINERS:
        raise InvalidRequest(f"{what} has more than {MAX_JSON_CONTAINERS} objects and arrays")
    if num_values > max_values:
        raise InvalidRequest(f"{what} has more than {max_values} values")


def _counts_outside_strings(data: bytes) -> tuple[int, int]:
    """Return (containers, values and keys) outside strings. numpy releases the GIL."""
    plain = data
    if b"\\" in data:  # left to right: first pairs of backslashes, then quotes behind one
        plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    array = np.frombuffer(plain, dtype=np.uint8)
    num_containers = num_separators = 0
    inside = np.uint8(0)
    for start in range(0, len(array), _SLICE_BYTES):
        piece = array[start : start + _SLICE_BYTES]
        quotes = (piece == ord('"')).view(np.uint8)
        quotes[0] ^= inside
        is_inside = np.bitwise_xor.accumulate(quotes)
        inside = is_inside[-1]
        outside = piece[is_inside == 0]
        num_containers += int(np.count_nonzero((outside == ord("[")) | (outside == ord("{"))))
        num_separators += int(np.count_nonzero((outside == ord(",")) | (outside == ord(":"))))
    return num_containers, num_containers + num_separators
