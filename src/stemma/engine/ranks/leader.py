"""Rank 0's side: starts the other ranks, tells them what to do, and learns when one of them ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from stemma.config.settings import EngineSettings
from stemma.engine.ranks.messages import (
    Ask,
    Close,
    Failed,
    Link,
    LoadBlocks,
    Open,
    Reached,
    Reply,
    Start,
    StartPrefetch,
)
from stemma.engine.ranks.settings import settings_of_rank, shares_of
from stemma.errors import EngineFailed, StemmaError
from stemma.memory.device.accelerator import resolve_device
from stemma.memory.tiers.pool_asks import PoolAsk
from stemma.model.parallel.group import LOAD_TIMEOUT_S, STEP_TIMEOUT_S, RankGroup
from stemma.supervision import Supervisor, start_thread
from stemma.types import BlockKey

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 600.0
"""For a rank's process to import what it needs; one that has ended is noticed at once."""
CLOSE_TIMEOUT_S = 30.0
"""For a rank to write what its tiers have queued."""
_NOTICE_S = 2.0
"""For the end of a process to be seen, once its connections broke."""
END_TIMEOUT_S = 10.0
"""For a rank to end once its link did."""


class _Follower:
    """One other rank, seen from here."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            # stdout belongs to the command that started us; what ranks have to say goes to stderr.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stemma.engine.ranks.follower", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=_environment(),
            )
        self.link = Link(ours, send_timeout_s=STEP_TIMEOUT_S)
        self.stages: dict[str, Future[None]] = {name: Future() for name in ("started", "loaded", "open")}
        self.answers: dict[int, Future[Any]] = {}
        self.last_words: Exception | None = None

    def end(self, error: Exception) -> None:
        """Whoever waits for this rank gets `error`."""
        for future in (*self.stages.values(), *list(self.answers.values())):
            if not future.done():
                future.set_exception(error)

    def describe_end(self, code: int | None) -> str:
        """Return a line on why the process is over."""
        if self.last_words is not None:
            return f"rank {self.rank} ended: {self.last_words}"
        how = "closed its link" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        return f"rank {self.rank} (process {self.process.pid}) {how}"


class Ranks:
    """The ranks of one engine. Methods may be called from any thread, unless they say otherwise."""

    def __init__(self, settings: EngineSettings, supervisor: Supervisor) -> None:
        """Start the other ranks and meet them. Raises EngineFailed if one doesn't come up.

        `supervisor` learns of a rank that ends after `open`.
        """
        shares = shares_of(settings)
        self.share = shares[0]
        self.settings = settings_of_rank(settings, self.share)
        """Those of rank 0."""
        self._supervisor = supervisor
        self._numbers = count()
        self._lock = threading.Lock()
        """Held while a message goes to all ranks: they get all messages in the same order."""
        self._failure: StemmaError | None = None
        self._failed = threading.Event()
        self._is_open = self._is_closing = False
        self._folder = tempfile.TemporaryDirectory(prefix="stemma-ranks-")
        self._followers = [_Follower(share.number) for share in shares[1:]]
        self._threads = [
            start_thread(f"stemma-rank-{one.rank}", partial(self._listen, one), supervisor)
            for one in self._followers
        ]
        with self.closing_on_error():
            meeting = Path(self._folder.name) / "meeting"
            for one, share in zip(self._followers, shares[1:], strict=True):
                one.link.send(Start(settings, share, meeting))
            self._wait_for("started", START_TIMEOUT_S)
            device = resolve_device(self.settings.model.device)
            self.group = RankGroup(self.share, meeting, device.type)
            """For `load_model`."""

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Within it, end all ranks on an error, and raise what the first rank that failed said of it."""
        try:
            yield
        except Exception as error:
            for one in self._followers:
                one.link.close()
            for thread in self._threads:  # who failed first has said so, or ends now
                thread.join(END_TIMEOUT_S)
            failure = self._failure
            self.close()
            if failure is not None and not isinstance(error, type(failure)):
                raise failure from error
            raise

    def open(self, message: Open) -> None:
        """Let the ranks allocate KV and open their tiers. Raises what the first that fails says."""
        self._wait_for("loaded", LOAD_TIMEOUT_S)
        self.tell(message)
        self._wait_for("open", LOAD_TIMEOUT_S)
        self.group.end_loading()
        self._is_open = True
        if self._failure is not None:
            raise self._failure

    def tell(self, message: object) -> None:
        """Send a message to all ranks. Raises EngineFailed if one doesn't take it."""
        self.tell_each([message] * len(self._followers))

    def tell_each(self, messages: Sequence[object]) -> None:
        """Send each rank, from rank 1 on, a message of its own. Errors as `tell`."""
        try:
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                for one, message in zip(self._followers, messages, strict=True):
                    one.link.send(message)
        except OSError as error:
            raise self.explain(EngineFailed(f"a rank takes no messages: {error}")) from error

    def ask(self, method: str, *arguments: object) -> list[Future[Any]]:
        """Let the other ranks call a method of their tiers; return their answers to come, from rank 1 on."""
        number = next(self._numbers)
        return self._expect(number, Ask(number, method, arguments))

    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> list[Future[int]]:
        """Let the other ranks load blocks; return how many leading ones arrive, from rank 1 on."""
        number = next(self._numbers)
        return self._expect(number, LoadBlocks(number, keys, block_ids))

    def prefetch(
        self, parent: BlockKey, keys: Sequence[BlockKey], owners: Sequence[str], ask: PoolAsk
    ) -> tuple[int, list[Future[float]]]:
        """Let the other ranks prefetch; return the number to stop it by, and their probes, from rank 1 on.

        A probe's result is what asking the pool takes there lately, in seconds.
        """
        number = next(self._numbers)
        return number, self._expect(number, StartPrefetch(number, parent, keys, owners, ask))

    def result(self, future: Future[Any], timeout_s: float = STEP_TIMEOUT_S) -> Any:
        """Wait for an answer. Raises EngineFailed if the rank ends, or doesn't answer: then all end."""
        try:
            return future.result(timeout_s)
        except FutureTimeout as error:
            if future.done():
                raise
            raise self.explain(EngineFailed(f"a rank did not answer in {timeout_s:.0f} s")) from error

    def fail(self, error: StemmaError) -> None:
        """End all ranks: they can't go on together. The supervisor gets the first error."""
        with self._lock:
            if self._failure is not None or self._is_closing:
                return
            self._failure = error
            self._failed.set()
        for one in self._followers:
            one.link.close()
            one.end(error)
        if self._is_open:
            self._supervisor.on_thread_failure("stemma-ranks", error)

    def explain(self, symptom: StemmaError) -> StemmaError:
        """End all ranks and return why: a rank that ended, if one did, else what was noticed here."""
        self._failed.wait(_NOTICE_S)
        self.fail(symptom)
        return self._failure or symptom

    def close(self) -> None:
        """End the ranks once their tiers are written, or kill them. A second call does nothing."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            timeout_s = CLOSE_TIMEOUT_S if self._failure is None else END_TIMEOUT_S
            for one in self._followers:
                with suppress(OSError):  # it has ended
                    one.link.send(Close())
        for one in self._followers:
            try:
                one.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                logger.warning("rank %d does not end; it is killed", one.rank)
                one.process.kill()
                one.process.wait()
            one.link.close()
        for thread in self._threads:
            thread.join()
        self._folder.cleanup()

    def _expect(self, number: int, message: object) -> list[Future[Any]]:
        futures: list[Future[Any]] = []
        for one in self._followers:
            one.answers[number] = Future()
            futures.append(one.answers[number])
        self.tell(message)
        return futures

    def _wait_for(self, stage: str, timeout_s: float) -> None:
        for one in self._followers:
            try:
                one.stages[stage].result(timeout_s)
            except FutureTimeout as error:
                raise EngineFailed(f"rank {one.rank} has not {stage} after {timeout_s:.0f} s") from error

    def _listen(self, one: _Follower) -> None:
        """Take a rank's messages until it ends."""
        try:
            while True:
                message = one.link.receive()
                if isinstance(message, Reached):
                    one.stages[message.stage].set_result(None)
                elif isinstance(message, Reply):
                    _settle(one.answers.pop(message.number), message.value)
                elif isinstance(message, Failed):
                    one.last_words = message.error
        except (EOFError, OSError):
            pass
        code: int | None = None
        try:
            code = one.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        error: StemmaError = EngineFailed(one.describe_end(code))
        if not self._is_open and isinstance(one.last_words, StemmaError):
            error = one.last_words  # of the same type as in one process
        self.fail(error)
        one.end(error)


def _settle(future: Future[Any], value: object) -> None:
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)


def _environment() -> dict[str, str]:
    """Return our environment; the other process finds this package where we found it."""
    here = str(Path(__file__).parents[3])
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
