"""One open batch: its lines are read, answered depth first as there is room, and written to files."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TypeVar
from uuid import uuid4

from stemma.engine.client import EngineClient
from stemma.errors import EngineFailed, GenerationFailed, NotFound, OverBudget, StemmaError, StorageError
from stemma.server.lifecycle import Lifecycle
from stemma_batch.calls import Answered, LocalCalls, record_of
from stemma_batch.lines import BadLine, BatchLine, LineLimits, body_of, read_lines
from stemma_batch.records import OUTPUT_PURPOSE, Batch, BatchStatus, BatchUsage, StoredFile
from stemma_batch.seats import FairSeats
from stemma_batch.storage import BatchStorage
from stemma_batch.store import BatchStore

KEPT_S = 30 * 24 * 3600
"""How long files are kept unless their sender says otherwise."""
T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_TOLD_ERRORS = 100
"""Wrong lines that a failed batch names."""
_LOOK_AGAIN_S = 0.02
"""How often it is looked whether somebody waits for a seat."""
_LONGEST_RETRY_S = 30.0
_GOING_ON = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
LINES_AT_ONCE = 64
"""Lines of one batch that have begun: answered, or waiting to be tried again."""
_READ_BYTES, _READ_LINES = 4 * 2**20, 4096
"""Of a file, read at one time."""
_LEAST_ROOM_BYTES = 4096
"""Disk space without which no line is answered."""
_EXPIRED = {
    "code": "batch_expired",
    "message": "the request wasn't answered before the batch's completion window ended",
}


class BatchRun:
    """One batch from where it stands to its end."""

    def __init__(
        self,
        batch: Batch,
        storage: BatchStorage,
        calls: LocalCalls,
        seats: FairSeats,
        engine: EngineClient,
        lifecycle: Lifecycle,
        limits: LineLimits,
    ) -> None:
        """`seats`: of the lines of all batches that are answered at one time."""
        self.batch = batch
        self._storage = storage
        self._calls = calls
        self._seats = seats
        self._engine = engine
        self._lifecycle = lifecycle
        self._limits = limits
        self._places = asyncio.Semaphore(LINES_AT_ONCE)
        """Of lines that have begun: those that are to be tried again hold no seat meanwhile."""
        self._stopped = asyncio.Event()
        self._is_cancelled = False
        self._failure: StemmaError | None = None
        """Why a line could be neither read nor stored."""

    async def cancel(self) -> None:
        """Start no more lines; those under way are answered."""
        if self.batch.status in _GOING_ON:
            self._is_cancelled = True
            await self._save(self.batch.at(BatchStatus.CANCELLING, time.time()))
            self._stopped.set()

    async def fail(self, message: str) -> None:
        """End the batch as failed; its files hold what was answered. Raises StorageError."""
        self._failure = GenerationFailed(message)
        await self._finish()

    async def run(self) -> None:
        """Go on until the batch has ended or the server drains; the next start goes on from there.

        Raises StorageError if the disk fails; what was stored is whole, and this may be called again.
        """
        await self._load()
        if self.batch.status is BatchStatus.VALIDATING and not await self._read():
            return
        if self.batch.status is BatchStatus.IN_PROGRESS:
            await self._answer_lines()
        if self._failure is not None and not isinstance(self._failure, NotFound):
            raise self._failure
        if not self._lifecycle.draining and self._engine.failure is None:
            await self._finish()

    async def _load(self) -> None:
        """Go on from what is stored, which may be less than what an earlier run had in mind."""
        stored = await self._call(lambda store: store.batch(self.batch.owner, self.batch.batch_id))
        self._failure = None
        if not self._is_cancelled:
            self._stopped.clear()
        elif stored.status in _GOING_ON:
            stored = stored.at(BatchStatus.CANCELLING, time.time())
        self.batch = stored

    async def _save(self, batch: Batch) -> None:
        self.batch = batch
        await self._call(lambda store: store.save(batch))

    async def _call(self, work: Callable[[BatchStore], T]) -> T:
        return await self._storage.call(work, self.batch.owner)

    # Reading

    async def _read(self) -> bool:
        """Check the file's lines; return whether there is anything to answer."""
        errors: list[dict[str, object]] = []
        try:
            num_lines = await self._put_lines(errors)
        except StorageError as error:
            errors, num_lines = [_error(str(error), "invalid_file", None, None)], 0
        if not errors and not num_lines:
            errors.append(_error("the file has no request", "empty_file", None, None))
        if self.batch.status is not BatchStatus.VALIDATING:  # cancelled meanwhile
            return True
        now = time.time()
        if errors:
            await self._save(self.batch.at(BatchStatus.FAILED, now, errors=tuple(errors)))
            return False
        await self._save(self.batch.at(BatchStatus.IN_PROGRESS, now, num_total=num_lines))
        return True

    async def _put_lines(self, errors: list[dict[str, object]]) -> int:
        """Store the file's lines, piece by piece, so that others have their turn; return their number."""
        batch = self.batch
        path = self._storage.store.path_of(batch.input_file_id)
        lines = read_lines(path, batch.endpoint, self._limits)
        await self._call(lambda store: store.drop_lines(batch))
        reading = _Reading(batch, lines, errors)
        while await self._call(reading.put_some):
            pass
        if errors:
            await self._call(lambda store: store.drop_lines(batch))
        return await self._call(lambda store: len(store.open_lines(batch)))

    # Answering

    async def _answer_lines(self) -> None:
        batch = self.batch
        numbers = await self._call(lambda store: store.open_lines(batch))
        lines: set[asyncio.Task[None]] = set()
        try:
            for number in numbers:
                await self._places.acquire()
                if not await self._has_seat():
                    self._places.release()
                    break
                line = asyncio.create_task(self._answer_line(number))
                lines.add(line)
                line.add_done_callback(lines.discard)
            while lines:
                await asyncio.wait(set(lines), timeout=self._left_s())
                if self._left_s() <= 0:
                    break
        finally:
            for line in list(lines):
                line.cancel()
            await asyncio.gather(*lines, return_exceptions=True)

    def _left_s(self) -> float:
        return max(0.0, self.batch.expires_at - time.time())

    def _is_over(self) -> bool:
        return self._stopped.is_set() or self._lifecycle.draining or self._left_s() <= 0

    async def _has_seat(self) -> bool:
        """Wait for a seat, and until nobody waits in the engine; return False if the batch starts no more."""
        owner = self.batch.owner
        await self._seats.acquire(owner)
        has_seat = False
        try:
            while not self._is_over():
                if (await self._engine.stats()).num_waiting == 0:
                    has_seat = True
                    break
                await asyncio.sleep(_LOOK_AGAIN_S)
        except EngineFailed:
            pass
        finally:
            if not has_seat:
                self._seats.release(owner)
        return has_seat

    async def _answer_line(self, number: int) -> None:
        """Answer a line, on a seat that is taken; while it waits to be tried again others have the seat.

        Without a record the line is answered again after a restart.
        """
        try:
            while (again_s := await self._attempt(number)) is not None:
                if not (await self._rested(again_s) and await self._has_seat()):
                    break
        except (NotFound, StorageError) as error:
            self._failure = error
            self._stopped.set()
        except Exception:
            logger.exception("batch %s, request %d", self.batch.batch_id, number)
            self._failure = GenerationFailed("internal error")
            self._stopped.set()
        finally:
            self._places.release()

    async def _attempt(self, number: int) -> float | None:
        """Answer a line, store its record and give the seat back; return the seconds until it is worth
        another try, or None if it is done.

        Raises NotFound or StorageError.
        """
        owner = self.batch.owner
        try:
            self._check_room()
            custom_id, body = await self._call(lambda store: self._line(store, number))
            answered = await self._calls.answer(self.batch.endpoint, body, owner)
            with closing(answered):
                if answered.is_busy:
                    return min(answered.retry_after_s, _LONGEST_RETRY_S)
                await self._store(number, custom_id, answered)
        finally:
            self._seats.release(owner)
        return None

    def _check_room(self) -> None:
        """Raise StorageError if no result can be kept: then none is computed."""
        try:
            self._storage.store.budget.check(_LEAST_ROOM_BYTES, self.batch.owner)
        except OverBudget as error:
            raise StorageError(f"its results have no room (--batch-bytes): {error}") from error

    def _line(self, store: BatchStore, number: int) -> tuple[str, bytes]:
        custom_id, raw = store.line(self.batch, number)
        return custom_id, body_of(raw, self._limits)

    async def _rested(self, seconds: float) -> bool:
        """Wait; return whether the line may still be tried again."""
        if not self._is_over():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), seconds)
        return not self._is_over() and self._engine.failure is None

    async def _store(self, number: int, custom_id: str, answered: Answered) -> None:
        """Store a line's record, or that there is no room for it. Raises StorageError."""
        try:
            record = await self._call(lambda store: self._kept(store, answered.record(custom_id)))
            is_failed, usage = answered.status >= 400, answered.usage
        except OverBudget as error:
            told = {"code": "result_too_large", "message": f"the result has no room (--batch-bytes): {error}"}
            is_failed, usage = True, BatchUsage()
            try:
                record = await self._call(lambda store: self._kept(store, record_of(custom_id, None, told)))
            except OverBudget as full:
                raise StorageError(str(full)) from full
        before = self.batch
        self.batch = batch = replace(
            before,
            num_completed=before.num_completed + (not is_failed),
            num_failed=before.num_failed + is_failed,
            usage=before.usage if is_failed else before.usage.plus(usage),
        )
        await self._call(lambda store: store.put_result(batch, number, record, is_failed=is_failed))

    def _kept(self, store: BatchStore, record: bytes) -> bytes:
        """Return a record once there is room for it. Raises RateLimited or Overloaded."""
        store.take_room(record, self.batch.owner)
        return record

    # Ending

    async def _finish(self) -> None:
        """Write the files and end the batch."""
        batch = self.batch
        left = await self._call(lambda store: store.open_lines(batch))
        if batch.status is BatchStatus.CANCELLING:
            end = BatchStatus.CANCELLED
        elif self._failure is not None:
            code = "invalid_file" if isinstance(self._failure, NotFound) else "server_error"
            error = _error(str(self._failure), code, None, None)
            self.batch, end = replace(batch, errors=(error,)), BatchStatus.FAILED
        elif left or "expired_at" in batch.times:
            end = BatchStatus.EXPIRED
            await self._expire(len(left))
        else:
            end = BatchStatus.COMPLETED
            await self._save(batch.at(BatchStatus.FINALIZING, time.time()))
        before = self.batch
        ended = before.at(end, time.time())
        files = [(self._file(kind), kind == "error") for kind in ("output", "error")]
        self.batch = await self._call(lambda store: store.put_files(before, ended, files))

    async def _expire(self, num_left: int) -> None:
        """Record of each line that is left that it wasn't answered in time."""
        times = {**self.batch.times, "expired_at": int(time.time())}
        num_failed = self.batch.num_failed + num_left
        self.batch = batch = replace(self.batch, times=times, num_failed=num_failed)

        def record(custom_id: str) -> bytes:
            return record_of(custom_id, None, _EXPIRED)

        await self._call(lambda store: store.put_expired(batch, record))

    def _file(self, kind: str) -> StoredFile:
        now = int(time.time())
        name = f"{self.batch.batch_id}_{kind}.jsonl"
        return StoredFile(f"file-{uuid4().hex}", self.batch.owner, name, OUTPUT_PURPOSE, 0, now, now + KEPT_S)


@dataclass(slots=True)
class _Reading:
    """How far a batch's file has been read."""

    batch: Batch
    lines: Iterator[BatchLine | BadLine]
    errors: list[dict[str, object]]
    num_read: int = 0

    def put_some(self, store: BatchStore) -> bool:
        """Store the next lines; return whether there may be more."""
        some: list[BatchLine] = []
        num_before, num_bytes = self.num_read, 0
        for one in self.lines:
            self.num_read += 1
            if isinstance(one, BadLine):
                self._tell(one)
                continue
            some.append(one)
            num_bytes += one.num_bytes
            if num_bytes > _READ_BYTES or self.num_read - num_before >= _READ_LINES:
                break
        if store.put_lines(self.batch, some) is not None:
            self.errors.append(_error("custom_id came before", "duplicate_custom_id", None, "custom_id"))
            return False
        return self.num_read > num_before

    def _tell(self, bad: BadLine) -> None:
        if len(self.errors) < MAX_TOLD_ERRORS:
            self.errors.append(_error(str(bad), bad.code, self.num_read, bad.param))


def _error(message: str, code: str, line: int | None, param: str | None) -> dict[str, object]:
    return {"code": code, "message": message, "line": line, "param": param}
