"""Finished requests on their way into the usage ledger (`insight/ledger.py`), and what `/metrics` says of it.

The last output of an answer waits until its row is committed: an answer that a client has seen whole is in
the ledger, whatever happens to this process. A database that doesn't answer delays an answer by
`COMMIT_TIMEOUT_S` at most; its row then stays in the queue, and the answer is counted as late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stemma.engine.api import GenerationRequest
from stemma.engine.client import EngineClient
from stemma.insight.usage_record import UsageRecord
from stemma.server.observe.collected import Collected, TurnObserver
from stemma.server.observe.metrics import ServerMetrics

if TYPE_CHECKING:
    from stemma.insight.ledger import Ledger  # needs SQLAlchemy, a tenth of a second of the start

logger = logging.getLogger(__name__)

COMMIT_TIMEOUT_S = 5.0
NO_TENANT = "(none)"
"""Who asked, where there are no tenants; no tenant can have this name."""
_RECORDED = {"aborted": "aborted", "error": "error", "refused": "aborted"}
"""Outcomes of requests that computed something, and what the ledger calls them: one that was refused after
its first output took too long, or the server went down.
"""


class UsageLedger(Collector):
    """The ledger of one server, or none. For one event loop."""

    def __init__(self, given: str | None, engine: EngineClient) -> None:
        """Open the database that a setting names. Raises ConfigError or StorageError."""
        self._engine = engine
        self._failure: str | None = None
        self.num_late = 0
        self._ledger: Ledger | None = None
        if given is not None:
            from stemma.insight.ledger import Ledger, ledger_url

            self._ledger = Ledger(ledger_url(given), self)

    @classmethod
    def of(cls, given: str | None, engine: EngineClient, metrics: ServerMetrics) -> UsageLedger:
        """Return the ledger that a setting names, shown by `metrics`. Raises ConfigError or StorageError."""
        ledger = cls(given, engine)
        metrics.register(ledger)
        return ledger

    def on_thread_failure(self, name: str, error: BaseException) -> None:
        """Record nothing from here on; each request is logged."""
        logger.critical("thread %s failed, no usage is recorded any more: %r", name, error, exc_info=error)
        self._failure = repr(error)

    def entry(self, request: GenerationRequest, api: str) -> LedgerEntry:
        """Return what records `request`, which came in over `api`."""
        return LedgerEntry(self, request, api)

    def put(self, record: UsageRecord) -> Future[bool] | None:
        """Record a request soon; returns the future of `Ledger.record`, or None if nothing is recorded."""
        if self._ledger is None:
            return None
        if self._failure is not None:
            logger.error("not in the usage ledger, whose thread failed: %r", record)
            return None
        return self._ledger.record(record)

    async def commit(self, record: UsageRecord) -> None:
        """Record a finished request, and return once it is committed or the time is over."""
        future = self.put(record)
        if future is None:
            return
        committed = asyncio.wrap_future(future)
        await asyncio.wait({committed}, timeout=COMMIT_TIMEOUT_S)
        if not committed.done():
            self.num_late += 1
            logger.warning("request %s is answered before the usage ledger has it", record.request_id)
        elif not committed.result():
            logger.error("not in the usage ledger, which refused it: %r", record)

    def row(self, request: GenerationRequest, api: str, outcome: str, answer: Collected) -> UsageRecord:
        """Return the row of a request. What was computed for it and never told is counted as well."""
        cache = answer.exact
        return UsageRecord(
            request_id=request.request_id,
            finished_at=time.time(),
            tenant=request.namespace.owner or NO_TENANT,
            model=self._engine.model_name if request.adapter is None else request.adapter.name,
            api=api,
            outcome=outcome,
            hit_tokens=dict(cache.cached_by_tier),
            miss_tokens=cache.num_prompt_tokens - cache.num_cached_tokens,
            output_tokens=answer.num_generated_tokens + answer.num_held_tokens,
        )

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of this moment."""
        ledger = self._ledger
        if ledger is None:
            return
        for name, text, count in (
            ("stemma_ledger_rows_written", "Requests in the usage ledger", ledger.num_written),
            ("stemma_ledger_rows_refused", "Requests that the usage ledger lost", ledger.num_refused),
            ("stemma_ledger_late_answers", "Answers sent before their row was committed", self.num_late),
        ):
            yield CounterMetricFamily(name, text, value=count)
        waiting = ledger.num_waiting
        yield GaugeMetricFamily("stemma_ledger_rows_waiting", "Rows to be committed", value=waiting)

    def close(self) -> None:
        """Write what is waiting."""
        if self._ledger is not None:
            self._ledger.close()


class LedgerEntry(TurnObserver):
    """One request on its way into the ledger."""

    def __init__(self, ledger: UsageLedger, request: GenerationRequest, api: str) -> None:
        self._ledger = ledger
        self._request = request
        self._api = api
        self._has_begun = False
        self._is_recorded = False

    def began(self, so_far: Collected) -> None:
        """From now on it costs something."""
        self._has_begun = True

    async def finished(self, so_far: Collected) -> None:
        """Record a whole answer and wait until the ledger has it."""
        self._is_recorded = True
        await self._ledger.commit(self._ledger.row(self._request, self._api, "ok", so_far))

    def ended(self, so_far: Collected, outcome: str) -> None:
        """Record how it ended, if it did any work and isn't recorded yet; waits for nothing."""
        if self._has_begun and not self._is_recorded and outcome in _RECORDED:
            self._is_recorded = True
            self._ledger.put(self._ledger.row(self._request, self._api, _RECORDED[outcome], so_far))
