"""``cache_control`` marks: how long to keep a prompt's tokens, up to each mark.

What lies before a mark is kept at least as long as the mark says. So tokens between two marks have the
longest time of those behind them, and what follows the last mark has no hint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from stemma.errors import InvalidRequest
from stemma.server.schemas.messages import CacheMark, CountTokensRequest
from stemma.types import DEFAULT_PRIORITY, RetentionHint, RetentionRange, TokenArray

MAX_MARKS = 4
MARKED_PRIORITY = DEFAULT_PRIORITY + 20
"""Priority of the blocks before a mark."""
_TTL_S = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark, or several at the same place."""

    num_turns: int
    """Turns up to and including the mark; 0: it is in the system text or the tools."""
    ttl_s: float


def marks_of(body: CountTokensRequest) -> list[Mark]:
    """Return the marks in order, the longest of those at one place.

    Raises InvalidRequest naming a wrong one.
    """
    found = list(_marks(body))
    if len(found) > MAX_MARKS:
        raise InvalidRequest(
            f"at most {MAX_MARKS} blocks may have cache_control, found {len(found)}", param="cache_control"
        )
    longest: dict[int, float] = {}
    for num_turns, mark in found:
        longest[num_turns] = max(_TTL_S[mark.ttl], longest.get(num_turns, 0.0))
    return [Mark(num_turns, longest[num_turns]) for num_turns in sorted(longest)]


def ranges_of(marks: Sequence[Mark], ends: Sequence[int]) -> tuple[RetentionRange, ...]:
    """Return the hints of a prompt in which `ends` tokens lie before each of the marks."""
    ranges: list[RetentionRange] = []
    for number, end in enumerate(ends):
        ttl_s = max(mark.ttl_s for mark in marks[number:])
        if end > (ranges[-1].num_tokens if ranges else 0):
            ranges.append(RetentionRange(end, RetentionHint(MARKED_PRIORITY, ttl_s)))
    return tuple(ranges)


def _marks(body: CountTokensRequest) -> Iterator[tuple[int, CacheMark]]:
    for tool in body.tools or ():
        if tool.cache_control is not None:
            yield 0, tool.cache_control
    yield from ((0, mark) for mark in _of_blocks(body.system, "system"))
    for number, turn in enumerate(body.messages):
        where = f"messages[{number}].content"
        yield from ((number + 1, mark) for mark in _of_blocks(turn.content, where))
        for place, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            inner = f"{where}[{place}].content"
            yield from ((number + 1, mark) for mark in _of_blocks(block.get("content"), inner))
    if body.cache_control is not None:
        yield len(body.messages), body.cache_control


def _of_blocks(content: Any, where: str) -> Iterator[CacheMark]:
    for number, block in enumerate(content if isinstance(content, list) else ()):
        given = block.get("cache_control") if isinstance(block, dict) else None
        if given is None:
            continue
        spot = f"{where}[{number}].cache_control"
        try:
            yield CacheMark.model_validate(given)
        except ValidationError as error:
            message = f"{spot} must be {{'type': 'ephemeral'}} with a ttl of '5m' or '1h'"
            raise InvalidRequest(message, param=spot) from error


def num_shared(left: TokenArray, right: TokenArray) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length
