"""Says that kernels are compiled, why, and how far that is; nothing where a library is there already.

Lines go to stderr. On a terminal a bar follows, unless another live display is on: lines appear above that.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stemma.native.compiling import UNITS
from stemma.native.cores import usable_cores
from stemma.native.levels import Level

_SECONDS = {"portable": 44, "avx2": 90, "avx512": 136, "avx512_bf16": 188, "amx": 157, "amx_emulated": 157}
_SECONDS |= {"neon": 90, "neon_bf16": 90}
"""Seconds that the compiler takes on one core, about: x86 on a Zen 3, the others guessed."""


def say(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def announced(level: Level) -> Iterator[Callable[[], None]]:
    """Say that `level` is compiled now; what is yielded is to be called for each unit that is ready."""
    cores = min(usable_cores(), len(UNITS))
    seconds = math.ceil(_SECONDS[level.name] * 1.1 / cores)
    say(
        f"Compiling the CPU kernels for {level.name}, the instructions of this processor: no library of "
        f"these sources is there yet. About {seconds} s on {cores} cores, once on this machine."
    )
    started = time.perf_counter()
    with _bar() if _is_free_terminal() else _lines(started) as advance:
        yield advance
    say(f"The CPU kernels are compiled, in {time.perf_counter() - started:.0f} s.")


def _is_free_terminal() -> bool:
    from rich.file_proxy import FileProxy  # what a live display of rich puts in stderr's place

    return not isinstance(sys.stderr, FileProxy) and sys.stderr.isatty()


@contextmanager
def _bar() -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling kernels", total=len(UNITS))
        yield lambda: progress.advance(task)


@contextmanager
def _lines(started: float) -> Iterator[Callable[[], None]]:
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        say(f"kernels: {done} of {len(UNITS)} parts compiled after {time.perf_counter() - started:.0f} s")

    yield advance
