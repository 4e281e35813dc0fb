"""A time limit for code that doesn't look at a clock: an exception is raised in the code's own thread.

It comes between two steps of the interpreter; a single call of a function in C isn't interrupted. One thread
watches over all.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOOK_EVERY_S = 0.25
_COMES_WITHIN_S = 5.0


class _Watch:
    """Who is watched, by thread. Its calls take no lock: an exception may come between any two steps."""

    def __init__(self) -> None:
        self._limits: dict[int, tuple[float, type[Exception]]] = {}
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float, kind: type[Exception]) -> None:
        if self._thread is None or not self._thread.is_alive():  # none yet, or this is a fork
            self._thread = threading.Thread(target=self._run, name="stemma-interrupts", daemon=True)
            self._thread.start()
        self._limits[threading.get_ident()] = time.monotonic() + seconds, kind
        self._begun.set()

    def end(self) -> None:
        """Watch this thread no more. If the exception is under way already, it is raised here."""
        if self._limits.pop(threading.get_ident(), None) is None:
            end = time.monotonic() + _COMES_WITHIN_S
            while time.monotonic() < end:
                time.sleep(0.001)

    def forget(self) -> None:
        """Watch this thread no more: the exception has come, or one like it was raised."""
        self._limits.pop(threading.get_ident(), None)

    def _run(self) -> None:
        while True:
            self._begun.wait()
            self._begun.clear()
            while self._limits:
                time.sleep(_LOOK_EVERY_S)
                now = time.monotonic()
                for thread, (limit, kind) in list(self._limits.items()):
                    if now > limit and self._limits.pop(thread, None) is not None:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(kind)
                        )


_watch = _Watch()


@contextmanager
def interrupted_after(seconds: float, kind: type[Exception]) -> Iterator[None]:
    """Raise a `kind`, made without arguments, in this thread if the block takes longer. Not to be nested."""
    _watch.begin(seconds, kind)
    try:
        yield
    except kind:
        _watch.forget()
        raise
    except BaseException:
        _watch.end()
        raise
    _watch.end()
