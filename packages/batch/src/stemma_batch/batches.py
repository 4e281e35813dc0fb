"""All batches of a server: made, shown, cancelled, and run beside its other requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from uuid import uuid4

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stemma.config.server_settings import ServerSettings
from stemma.engine.client import EngineClient
from stemma.errors import InvalidRequest, RateLimited, StorageError
from stemma.server.door.ledger import Admission, shared
from stemma.server.lifecycle import Lifecycle
from stemma.server.observe.metrics import ServerMetrics
from stemma.server.schemas.json_input import max_values_of
from stemma_batch.calls import LocalCalls
from stemma_batch.lines import LineLimits
from stemma_batch.records import BATCH_PURPOSE, ENDED, Batch, BatchOrder
from stemma_batch.run import BatchRun
from stemma_batch.seats import FairSeats
from stemma_batch.storage import BatchStorage
from stemma_batch.store import BatchStore

logger = logging.getLogger(__name__)

MAX_OPEN = 64
"""Batches of one owner that haven't ended."""
_RUN_AT_ONCE = 8
"""Batches of one owner whose lines take turns; later ones wait."""
RETRY_S = 30.0
"""Until a batch is tried again whose results couldn't be stored."""
_SWEEP_EVERY_S = 600.0


class Batches(Collector):
    """One server's; for its event loop, within `running`."""

    def __init__(
        self,
        settings: ServerSettings,
        store: BatchStore,
        calls: LocalCalls,
        engine: EngineClient,
        lifecycle: Lifecycle,
    ) -> None:
        self.storage = BatchStorage(store, engine)
        self.budget = store.budget
        """Bytes of the files that clients send, and of results."""
        self.calls = calls
        self._settings = settings
        self._engine = engine
        self._lifecycle = lifecycle
        self._seats = FairSeats(settings.batch_seats)
        self._turns: dict[str, asyncio.Semaphore] = {}
        """By owner: nobody's batches wait for another's to end."""
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._num_ended: dict[str, int] = {}

    @classmethod
    def of(
        cls,
        settings: ServerSettings,
        calls: LocalCalls,
        engine: EngineClient,
        lifecycle: Lifecycle,
        admission: Admission,
        metrics: ServerMetrics,
    ) -> Batches | None:
        """Return what the settings ask for; None: there is no directory. Raises StorageError."""
        if settings.batch_directory is None:
            return None
        budget = shared("batch_bytes", "bytes of batches, their files and results", settings.batch_bytes)
        admission.add(budget)
        found = cls(settings, BatchStore(settings.batch_directory, budget), calls, engine, lifecycle)
        metrics.register(found)
        return found

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of this moment."""
        yield GaugeMetricFamily("stemma_batches_open", "Batches that haven't ended", value=len(self._runs))
        ended = CounterMetricFamily("stemma_batches_ended", "Batches that have ended", labels=["status"])
        for status in sorted(ENDED):
            ended.add_metric([str(status)], self._num_ended.get(str(status), 0))
        yield ended

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Go on with what is open, and end in order; nothing that was stored is lost."""
        for batch in await self.storage.call(lambda store: store.open_batches()):
            self._begin(batch)
        sweep = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            tasks = [sweep, *(task for _, task in self._runs.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.storage.close()

    async def create(self, owner: str, asked: BatchOrder) -> Batch:
        """Store a batch and begin it. Raises InvalidRequest, NotFound, RateLimited or StorageError."""
        if asked.endpoint not in self.calls.paths:
            known = ", ".join(self.calls.paths)
            raise InvalidRequest(f"endpoint must be one of {known}", param="endpoint")
        file = await self.storage.call(lambda store: store.file(owner, asked.input_file_id))
        if file.purpose != BATCH_PURPOSE:
            raise InvalidRequest("the input file must have the purpose batch", param="input_file_id")
        if sum(run.batch.owner == owner for run, _ in self._runs.values()) >= MAX_OPEN:
            raise RateLimited(f"{MAX_OPEN} batches are open; wait until one has ended", RETRY_S)
        now = int(time.time())
        batch = Batch(
            f"batch_{uuid4().hex}",
            owner,
            asked.endpoint,
            asked.input_file_id,
            asked.completion_window,
            now,
            now + asked.window_s,
            metadata=asked.metadata,
        )
        await self.storage.call(lambda store: store.add_batch(batch))
        self._begin(batch)
        return batch

    async def batch(self, owner: str, batch_id: str) -> Batch:
        """Return a batch as it stands. Raises NotFound."""
        return await self.storage.call(lambda store: store.batch(owner, batch_id))

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Cancel a batch; return it. Raises NotFound, and InvalidRequest if it has ended."""
        batch = await self.batch(owner, batch_id)
        if batch_id not in self._runs:
            raise InvalidRequest(f"the batch is {batch.status} and can't be cancelled", param="batch_id")
        run, _ = self._runs[batch_id]
        await run.cancel()
        return run.batch

    def _begin(self, batch: Batch) -> None:
        run = BatchRun(
            batch,
            self.storage,
            self.calls,
            self._seats,
            self._engine,
            self._lifecycle,
            LineLimits(self._settings.max_body_bytes, max_values_of(self._engine.max_model_len)),
        )
        self._runs[batch.batch_id] = run, asyncio.create_task(self._run(run))

    async def _run(self, run: BatchRun) -> None:
        """Run a batch to its end, however often the disk fails."""
        batch_id = run.batch.batch_id
        turns = self._turns.setdefault(run.batch.owner, asyncio.Semaphore(_RUN_AT_ONCE))
        while True:
            try:
                async with turns:
                    await self._once(run)
                break
            except StorageError as error:
                logger.error("batch %s goes on in %g s: %s", batch_id, RETRY_S, error)
                await asyncio.sleep(RETRY_S)
        del self._runs[batch_id]
        if run.batch.status in ENDED:
            status = str(run.batch.status)
            self._num_ended[status] = self._num_ended.get(status, 0) + 1

    async def _once(self, run: BatchRun) -> None:
        """Go on from what is stored. Raises StorageError."""
        try:
            await run.run()
        except StorageError:
            raise
        except Exception:
            logger.exception("batch %s failed", run.batch.batch_id)
            await run.fail("internal error")

    async def _sweep(self) -> None:
        """Drop what has expired, now and then."""
        while True:
            try:
                await self.storage.call(lambda store: store.drop_expired(time.time()))
            except StorageError as error:
                logger.error("expired files stay: %s", error)
            await asyncio.sleep(_SWEEP_EVERY_S)
