"""A line of JSONL as a mapping."""

from __future__ import annotations

from typing import cast

import orjson

from stemma.errors import TraceError


def parse_object(line: bytes, number: int) -> dict[str, object]:
    """Return the JSON object of a line; raise TraceError if it is none."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"not JSON: {error}", line_number=number) from error
    if not isinstance(record, dict):
        raise TraceError("not a JSON object", line_number=number)
    return cast(dict[str, object], record)
