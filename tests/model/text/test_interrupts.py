"""Code that takes too long is interrupted, once, where it runs and nowhere else."""

from __future__ import annotations

import threading
import time

import pytest

from stemma.model.text.interrupts import interrupted_after


class TooSlow(Exception):
    pass


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_what_takes_too_long_is_interrupted() -> None:
    with pytest.raises(TooSlow), interrupted_after(0.05, TooSlow):
        busy(60.0)
    busy(0.6)  # nothing comes later


def test_what_ends_in_time_is_not() -> None:
    for _ in range(3):
        with interrupted_after(0.05, TooSlow):
            busy(0.01)
    busy(0.6)
    with pytest.raises(KeyError), interrupted_after(0.05, TooSlow):
        raise KeyError
    busy(0.6)


def test_what_ends_as_it_is_interrupted() -> None:
    """Whichever comes first, nothing is raised behind the block."""
    raised = []

    def run() -> None:
        for _ in range(4):
            try:
                with interrupted_after(0.0, TooSlow):
                    busy(0.25)
            except TooSlow:
                raised.append(True)
            busy(0.05)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) <= 12
