"""Progress of commands that may take more than two seconds, on stderr: a bar on a terminal, lines in a pipe.

What a command prints on stdout is its result alone, so that it can be read by programs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from typing_extensions import override

from stemma.supervision import LoggingSupervisor, start_thread

QUIET_S = 2.0
"""A command that ends before prints no line."""
LINE_EVERY_S = 10.0
_MIN_STEP_S = 0.05
"""Time between two reports of items: a loop over millions of rows isn't slowed by drawing."""
_T = TypeVar("_T")


class CommandProgress(Protocol):
    """Where a command says how far it is."""

    def __call__(self, stage: str, share: float | None = None) -> None:
        """Tell the stage, and the share of it that is done, 0 to 1; None: nobody knows."""


class LineProgress(CommandProgress):
    """Plain lines: the first after `quiet_s`, then one a stage, and one every `every_s` in between."""

    def __init__(
        self, title: str, console: Console, quiet_s: float = QUIET_S, every_s: float = LINE_EVERY_S
    ) -> None:
        self._console = console
        self._times_s = (quiet_s, every_s)
        self._lock = threading.Lock()
        self._stage, self._share = title, None  # type: tuple[str, float | None]
        self._is_quiet = True
        self._is_over = threading.Event()
        self._thread = start_thread("progress", self._tell_again, LoggingSupervisor())

    @override
    def __call__(self, stage: str, share: float | None = None) -> None:
        with self._lock:
            is_new = stage != self._stage
            self._stage, self._share = stage, share
            if is_new and not self._is_quiet:
                self._print()

    def close(self) -> None:
        """Print nothing more."""
        self._is_over.set()
        self._thread.join()

    def _tell_again(self) -> None:
        quiet_s, every_s = self._times_s
        wait_s = quiet_s
        while not self._is_over.wait(wait_s):
            with self._lock:
                self._is_quiet = False
                self._print()
            wait_s = every_s

    def _print(self) -> None:
        done = "" if self._share is None else f": {self._share:.0%}"
        self._console.print(f"{self._stage}{done}", markup=False, highlight=False, soft_wrap=True)


class BarProgress(CommandProgress):
    """A bar on a terminal, gone when the command prints its result."""

    def __init__(self, title: str, bars: Progress) -> None:
        self._bars = bars
        self._task = bars.add_task(escape(title), total=None)

    @override
    def __call__(self, stage: str, share: float | None = None) -> None:
        total = None if share is None else 1.0
        self._bars.update(self._task, description=escape(stage), total=total, completed=share or 0.0)


@contextmanager
def open_progress(title: str, console: Console | None = None) -> Iterator[CommandProgress]:
    """Yield where to report progress; `console` is that of stderr by default, and `title` the first stage."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        lines = LineProgress(title, console)
        try:
            yield lines
        finally:
            lines.close()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(show_speed=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield BarProgress(title, bars)


class StepCounter:
    """Counts steps towards a total and reports the share; for loops that say only what they have done."""

    def __init__(self, progress: CommandProgress, stage: str, total: int | None) -> None:
        """`total`: steps; None: nobody knows."""
        self.stage = stage
        self._progress = progress
        self._total = total
        self._num_done = 0
        self._report_at = 0.0

    def advance(self, num_steps: int = 1) -> None:
        """Note that steps were done."""
        self._num_done += num_steps
        if (now := time.monotonic()) >= self._report_at:
            share = None if self._total is None else min(1.0, self._num_done / max(1, self._total))
            self._progress(self.stage, share)
            self._report_at = now + _MIN_STEP_S

    def over(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yield the items, each a step."""
        for item in items:
            yield item
            self.advance()
