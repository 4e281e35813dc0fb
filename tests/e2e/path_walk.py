"""What of the code a request crosses: the files, the rooms, and how often it goes from room to room."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import stemma

T = TypeVar("T")
_HOUSE = str(Path(stemma.__file__).parent)


@dataclass
class Walk:
    """Calls of functions of ours while it is on, in all threads that were started since `profiled`."""

    is_on: bool = False
    functions: Counter[CodeType] = field(default_factory=Counter)
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls from one room into another, by (from, to)."""

    @property
    def files(self) -> set[str]:
        return {_file(code) for code in self.functions}

    @property
    def rooms(self) -> set[str]:
        return {str(Path(file).parent) for file in self.files}

    def calls_of(self, name: str) -> int:
        """Return how often functions with this qualified name were called."""
        return sum(count for code, count in self.functions.items() if code.co_qualname == name)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Take one event of the profiler."""
        code = frame.f_code
        if event != "call" or not self.is_on or not code.co_filename.startswith(_HOUSE):
            return
        self.functions[code] += 1
        caller = _caller(frame)
        if caller is not None:
            here, there = _room(caller), _room(code)
            if here != there:
                self.changes[here, there] += 1

    @contextmanager
    def on(self) -> Iterator[None]:
        self.is_on = True
        yield
        self.is_on = False


def _caller(frame: FrameType) -> CodeType | None:
    """Return the nearest function of ours below `frame`, whatever lies between."""
    below = frame.f_back
    while below is not None and not below.f_code.co_filename.startswith(_HOUSE):
        below = below.f_back
    return None if below is None else below.f_code


def _file(code: CodeType) -> str:
    return code.co_filename[len(_HOUSE) + 1 :]


def _room(code: CodeType) -> str:
    return str(Path(_file(code)).parent)


@contextmanager
def profiled(start: Callable[[], T]) -> Iterator[tuple[Walk, T]]:
    """Give the walk of all threads that `start` starts, off until it is asked for, and its result."""
    walk = Walk()
    threading.setprofile(walk.note)
    try:
        yield walk, start()
    finally:
        threading.setprofile(None)
