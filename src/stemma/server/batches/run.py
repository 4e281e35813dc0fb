"""One open batch: its lines are read, answered depth first as there is room, and written to files."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import orjson

from stemma.engine.client import EngineClient
from stemma.errors import EngineFailed, GenerationFailed, NotFound, StemmaError, StorageError
from stemma.server.batches.calls import Answered, LocalCalls, record_of
from stemma.server.batches.lines import BadLine, BatchLine, body_of, read_lines
from stemma.server.batches.records import OUTPUT_PURPOSE, Batch, BatchStatus, StoredFile
from stemma.server.batches.storage import BatchStorage
from stemma.server.batches.store import BatchStore
from stemma.server.lifecycle import Lifecycle

KEPT_S = 30 * 24 * 3600
"""How long files are kept unless their sender says otherwise."""
logger = logging.getLogger(__name__)

MAX_TOLD_ERRORS = 100
"""Wrong lines that a failed batch names."""
_LOOK_AGAIN_S = 0.02
"""How often it is looked whether somebody waits for a seat."""
_LONGEST_RETRY_S = 30.0
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
        seats: asyncio.Semaphore,
        engine: EngineClient,
        lifecycle: Lifecycle,
        max_line_bytes: int,
    ) -> None:
        """`seats`: of the lines of all batches that are answered at one time."""
        self.batch = batch
        self._storage = storage
        self._calls = calls
        self._seats = seats
        self._engine = engine
        self._lifecycle = lifecycle
        self._max_line_bytes = max_line_bytes
        self._stopped = asyncio.Event()
        self._failure: StemmaError | None = None
        """Why a line could be neither read nor stored."""

    async def cancel(self) -> None:
        """Start no more lines; those under way are answered."""
        if self.batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            await self._save(self.batch.at(BatchStatus.CANCELLING, time.time()))
            self._stopped.set()

    async def fail(self, message: str) -> None:
        """End the batch as failed; its files hold what was answered. Raises StorageError."""
        self._failure = GenerationFailed(message)
        await self._finish()

    async def run(self) -> None:
        """Go on until the batch has ended or the server drains; the next start goes on from there.

        Raises StorageError if the disk fails; what was stored is whole, and another run may follow.
        """
        if self.batch.status is BatchStatus.VALIDATING and not await self._read():
            return
        if self.batch.status is BatchStatus.IN_PROGRESS:
            await self._answer_lines()
        if self._failure is not None and not isinstance(self._failure, NotFound):
            raise self._failure
        if not self._lifecycle.draining and self._engine.failure is None:
            await self._finish()

    async def _save(self, batch: Batch) -> None:
        self.batch = batch
        await self._storage.call(lambda store: store.save(batch))

    # Reading

    async def _read(self) -> bool:
        """Check the file's lines; return whether there is anything to answer."""
        batch, limit = self.batch, self._max_line_bytes
        errors: list[dict[str, object]] = []

        def read(store: BatchStore) -> int:
            path = store.path_of(batch.input_file_id)
            lines = _told(read_lines(path, batch.endpoint, limit), errors)
            twice = store.put_lines(batch, lines)
            if twice is not None:
                errors.append(_error("custom_id came before", "duplicate_custom_id", None, "custom_id"))
            return len(store.open_lines(batch))

        try:
            num_lines = await self._storage.call(read)
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

    # Answering

    async def _answer_lines(self) -> None:
        batch = self.batch
        numbers = await self._storage.call(lambda store: store.open_lines(batch))
        lines: set[asyncio.Task[None]] = set()
        try:
            for number in numbers:
                if not await self._has_seat():
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
        await self._seats.acquire()
        try:
            while not self._is_over():
                if (await self._engine.stats()).num_waiting == 0:
                    return True
                await asyncio.sleep(_LOOK_AGAIN_S)
        except EngineFailed:
            pass
        self._seats.release()
        return False

    async def _answer_line(self, number: int) -> None:
        """Answer a line and store its record; without one the line is answered again after a restart."""
        try:
            custom_id, raw = await self._storage.call(lambda store: store.line(self.batch, number))
            answered = await self._answered(body_of(raw))
            if answered is not None:
                await self._store(number, answered.record(custom_id), answered)
        except (NotFound, StorageError) as error:
            self._failure = error
            self._stopped.set()
        except Exception:
            logger.exception("batch %s, request %d", self.batch.batch_id, number)
            self._failure = GenerationFailed("internal error")
            self._stopped.set()
        finally:
            self._seats.release()

    async def _answered(self, body: bytes) -> Answered | None:
        """Return the answer; None if the server drains or the batch ends before there is any."""
        while True:
            answered = await self._calls.answer(self.batch.endpoint, body, self.batch.owner)
            if not answered.is_busy:
                return answered
            if self._is_over() or self._engine.failure is not None:
                return None
            await asyncio.sleep(min(answered.retry_after_s, _LONGEST_RETRY_S))

    async def _store(self, number: int, record: bytes, answered: Answered) -> None:
        is_failed = answered.status >= 400
        before = self.batch
        usage = before.usage if is_failed else before.usage.plus(orjson.loads(answered.body))
        self.batch = batch = replace(
            before,
            num_completed=before.num_completed + (not is_failed),
            num_failed=before.num_failed + is_failed,
            usage=usage,
        )
        await self._storage.call(lambda store: store.put_result(batch, number, record, is_failed=is_failed))

    # Ending

    async def _finish(self) -> None:
        """Write the files and end the batch."""
        batch = self.batch
        left = await self._storage.call(lambda store: store.open_lines(batch))
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
        self.batch = await self._storage.call(lambda store: store.put_files(before, ended, files))

    async def _expire(self, num_left: int) -> None:
        """Record of each line that is left that it wasn't answered in time."""
        times = {**self.batch.times, "expired_at": int(time.time())}
        num_failed = self.batch.num_failed + num_left
        self.batch = batch = replace(self.batch, times=times, num_failed=num_failed)

        def record(custom_id: str) -> bytes:
            return record_of(custom_id, None, _EXPIRED)

        await self._storage.call(lambda store: store.put_expired(batch, record))

    def _file(self, kind: str) -> StoredFile:
        now = int(time.time())
        name = f"{self.batch.batch_id}_{kind}.jsonl"
        return StoredFile(f"file-{uuid4().hex}", self.batch.owner, name, OUTPUT_PURPOSE, 0, now, now + KEPT_S)


def _told(lines: Iterator[BatchLine | BadLine], errors: list[dict[str, object]]) -> Iterator[BatchLine]:
    """Yield the good lines; tell of the others in `errors`, up to `MAX_TOLD_ERRORS`."""
    for place, one in enumerate(lines):
        if isinstance(one, BatchLine):
            yield one
        elif len(errors) < MAX_TOLD_ERRORS:
            errors.append(_error(str(one), one.code, place + 1, one.param))


def _error(message: str, code: str, line: int | None, param: str | None) -> dict[str, object]:
    return {"code": code, "message": message, "line": line, "param": param}
