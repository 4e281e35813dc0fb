"""What the order of a table's columns costs: prompts made of rows share what their first columns share.

A row's prompt is its columns, one after the other. Sorted, a prompt shares with the one before it the leading
columns in which the rows agree. The best order of columns is a hard problem; here each place gets the column
that shares most behind those before it (the greedy step of Liu et al., arXiv:2403.05821, without their
different orders for different rows).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stemma.errors import ConfigError

_MAX_ROWS = 1_000_000


@dataclass(frozen=True, slots=True)
class ColumnAdvice:
    """The columns as they come, and in a better order."""

    num_rows: int
    num_tokens: int
    """Of all rows."""
    given: tuple[str, ...]
    num_shared_given: int
    """Tokens that sorted prompts share with the one before, with the columns as they come."""
    better: tuple[str, ...]
    num_shared_better: int


def read_table(path: Path) -> dict[str, list[str]]:
    """Return the columns of a CSV file with a header, or of JSON lines, by name. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            is_json = path.suffix in (".jsonl", ".json")
            rows: list[Mapping[str, Any]] = []
            for row in map(_object, file) if is_json else csv.DictReader(file, strict=True):
                rows.append(row)
                if len(rows) > _MAX_ROWS:
                    raise ConfigError(f"{path} has more than {_MAX_ROWS} rows; cut it")
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"can't read the table in {path}: {error}") from error
    if not rows:
        raise ConfigError(f"{path} has no rows")
    names = list(rows[0])
    if any(list(row) != names or None in row or None in row.values() for row in rows):
        raise ConfigError(f"the rows of {path} don't all have the columns {', '.join(map(str, names))}")
    return {name: [_text(row[name]) for row in rows] for name in names}


def _object(line: str) -> Mapping[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("a line is no JSON object")
    return row


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def advise_columns(table: Mapping[str, Sequence[str]], num_tokens: Callable[[str], int]) -> ColumnAdvice:
    """Return what the columns share as they come, and in the order that the greedy search finds."""
    lengths = {name: _lengths(column, num_tokens) for name, column in table.items()}
    given = tuple(table)
    num_rows = len(table[given[0]])
    groups = [0] * num_rows
    better: list[str] = []
    while len(better) < len(given):
        left = [name for name in given if name not in better]
        best = max(left, key=lambda name: _shared(groups, table[name], lengths[name])[0])
        better.append(best)
        groups = _shared(groups, table[best], lengths[best])[1]
    total = sum(sum(one) for one in lengths.values())
    as_given, reordered = num_shared(table, given, lengths), num_shared(table, better, lengths)
    if reordered <= as_given:
        better, reordered = list(given), as_given
    return ColumnAdvice(num_rows, total, given, as_given, tuple(better), reordered)


def num_shared(
    table: Mapping[str, Sequence[str]], order: Sequence[str], lengths: Mapping[str, Sequence[int]]
) -> int:
    """Return the tokens that rows, sorted by columns in `order`, share with the row before."""
    groups, total = [0] * len(table[order[0]]), 0
    for name in order:
        shared, groups = _shared(groups, table[name], lengths[name])
        total += shared
    return total


def _shared(groups: Sequence[int], column: Sequence[str], lengths: Sequence[int]) -> tuple[int, list[int]]:
    """Return the tokens that a column shares within groups of rows, and the groups that it makes of them."""
    numbers: dict[tuple[int, str], int] = {}
    total, made = 0, []
    for group, value, length in zip(groups, column, lengths, strict=True):
        key = group, value
        if key in numbers:
            total += length
        made.append(numbers.setdefault(key, len(numbers)))
    return total, made


def _lengths(column: Sequence[str], num_tokens: Callable[[str], int]) -> list[int]:
    known = {value: num_tokens(value) for value in set(column)}
    return [known[value] for value in column]
