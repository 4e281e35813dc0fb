"""Files of MMLU: one question a row, its four choices, and the letter of the right one."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stemma.errors import ConfigError

CHOICES = "ABCD"
_TEST, _DEV = "_test.csv", "_dev.csv"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt in the benchmark's own form, and the right letter."""

    prompt: str
    answer: str


def read_subject(test: Path, num_shots: int) -> list[Question]:
    """Return a subject's questions behind `num_shots` worked ones, from `../dev/SUBJECT_dev.csv`.

    Raises ConfigError if a file is missing or isn't of that form.
    """
    subject = test.name.removesuffix(_TEST)
    shots: list[list[str]] = []
    if num_shots:
        dev = examples_of(test)
        shots = read_rows(dev)[:num_shots]
        if len(shots) < num_shots:
            raise ConfigError(f"{dev} has {len(shots)} examples, {num_shots} are asked for")
    head = f"The following are multiple choice questions about {subject.replace('_', ' ')}.\n\n"
    head += "".join(f"{_as_text(row)} {row[5]}\n\n" for row in shots)
    return [Question(head + _as_text(row), row[5]) for row in read_rows(test)]


def examples_of(test: Path) -> Path:
    """Return where the worked examples of a test file are."""
    return test.parent.parent / "dev" / (test.name.removesuffix(_TEST) + _DEV)


def read_rows(file: Path) -> list[list[str]]:
    """Return the rows: question, four choices, letter. Raises ConfigError."""
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.reader(stream) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"can't read {file}: {error}") from error
    for number, row in enumerate(rows, 1):
        if len(row) != 6 or row[5] not in CHOICES:
            raise ConfigError(f"{file} row {number}: needs question, four choices and the answer's letter")
    return rows


def _as_text(row: Sequence[str]) -> str:
    choices = "".join(f"{letter}. {text}\n" for letter, text in zip(CHOICES, row[1:5], strict=True))
    return f"{row[0]}\n{choices}Answer:"
