"""``cache_control`` marks: how long to keep a prompt's blocks, and which tokens lie before the last mark.

The engine takes one hint per request. So all blocks of the request get the longest time of any mark, even
those after the last mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from stemma.errors import InvalidRequest
from stemma.server.schemas.messages import CacheControl, CountTokensRequest
from stemma.types import DEFAULT_PRIORITY, TokenArray

MAX_MARKS = 4
MARKED_PRIORITY = DEFAULT_PRIORITY + 20
"""Priority of the blocks of a request with a mark."""
_TTL_S = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one request."""

    ttl_s: float
    """The longest time that one of them names."""
    num_turns: int
    """Turns up to and including the last mark; 0: it is in the system text or the tools."""


def marks_of(body: CountTokensRequest) -> Marks | None:
    """Return the marks; None if there are none. Raises InvalidRequest naming a wrong one."""
    found = list(_marks(body))
    if len(found) > MAX_MARKS:
        raise InvalidRequest(
            f"at most {MAX_MARKS} blocks may have cache_control, found {len(found)}", param="cache_control"
        )
    if not found:
        return None
    return Marks(max(_TTL_S[mark.ttl] for _, mark in found), max(turns for turns, _ in found))


def _marks(body: CountTokensRequest) -> Iterator[tuple[int, CacheControl]]:
    for tool in body.tools or ():
        if tool.cache_control is not None:
            yield 0, tool.cache_control
    yield from ((0, mark) for mark in _of_blocks(body.system, "system"))
    for number, turn in enumerate(body.messages):
        where = f"messages[{number}].content"
        yield from ((number + 1, mark) for mark in _of_blocks(turn.content, where))
    if body.cache_control is not None:
        yield len(body.messages), body.cache_control


def _of_blocks(content: Any, where: str) -> Iterator[CacheControl]:
    for number, block in enumerate(content if isinstance(content, list) else ()):
        given = block.get("cache_control") if isinstance(block, dict) else None
        if given is None:
            continue
        spot = f"{where}[{number}].cache_control"
        try:
            yield CacheControl.model_validate(given)
        except ValidationError as error:
            message = f"{spot} must be {{'type': 'ephemeral'}} with a ttl of '5m' or '1h'"
            raise InvalidRequest(message, param=spot) from error


def num_shared(left: TokenArray, right: TokenArray) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length
