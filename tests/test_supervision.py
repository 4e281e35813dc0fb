"""Errors that nobody expects reach the supervisor, whatever their type."""

from __future__ import annotations

import logging

import pytest

from stemma.supervision import LoggingSupervisor, Supervisor, start_thread


class Recorder(Supervisor):
    """Remembers what was reported."""

    def __init__(self) -> None:
        self.failures: list[tuple[str, BaseException]] = []

    def on_thread_failure(self, name: str, error: BaseException) -> None:
        self.failures.append((name, error))


@pytest.mark.parametrize("error", [OverflowError("boom"), SystemExit(1), KeyboardInterrupt()])
def test_an_error_of_any_type_is_reported_with_the_threads_name(error: BaseException) -> None:
    def run() -> None:
        raise error

    recorder = Recorder()
    start_thread("stemma-test", run, recorder).join(5.0)
    assert recorder.failures == [("stemma-test", error)]


def test_a_thread_that_ends_by_itself_is_not_reported() -> None:
    recorder = Recorder()
    thread = start_thread("stemma-test", lambda: None, recorder)
    thread.join(5.0)
    assert not thread.is_alive()
    assert recorder.failures == []


def test_the_logging_supervisor_writes_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise ZeroDivisionError("no such thing")

    with caplog.at_level(logging.ERROR):
        start_thread("stemma-test", run, LoggingSupervisor()).join(5.0)
    assert "stemma-test" in caplog.text
    assert "Traceback" in caplog.text
