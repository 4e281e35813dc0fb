"""A server's memory of its answers, put together: the answers, their file and their metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stemma.config.server_settings import ServerSettings
from stemma.engine.client import EngineClient
from stemma.errors import StorageError
from stemma.server.history.answers import WrittenAnswers
from stemma.server.history.joining import HistoryJoiner
from stemma.server.history.log import FILE_NAME, AnswerLog
from stemma.server.observe.metrics import ServerMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenHistory(Collector):
    """What a server remembers of the answers that it wrote, and what uses it."""

    joiner: HistoryJoiner
    log: AnswerLog | None
    """None: there is no disk tier, or its directory takes no file."""

    @classmethod
    def of(
        cls,
        settings: ServerSettings,
        engine: EngineClient,
        metrics: ServerMetrics,
        *,
        ttl_s: float | None = None,
    ) -> WrittenHistory | None:
        """Return what the settings ask for, shown by `metrics`; None: exact history is off.

        `ttl_s`: answers that weren't used for so long are dropped.
        """
        if settings.exact_history == "off":
            return None
        written = WrittenAnswers(engine.tokenizer, settings.history_memory, ttl_s=ttl_s)
        found = cls(HistoryJoiner(written, engine.tokenizer), _log(written, settings.history_memory, engine))
        metrics.register(found)
        return found

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of this moment."""
        written = self.joiner.written
        for name, text, gauge in (
            ("stemma_history_answers", "Answers whose token ids are kept", len(written)),
            ("stemma_history_bytes", "Memory that they take", written.num_bytes),
        ):
            yield GaugeMetricFamily(name, text, value=gauge)
        yield CounterMetricFamily(
            "stemma_history_evicted", "Answers dropped to make room", value=written.num_evicted
        )

    def flush(self) -> int:
        """Drop all answers, from the file too; return how many. Raises StorageError if the file stays."""
        number = self.joiner.written.clear()
        if self.log is not None:
            self.log.rewrite()
        return number

    def close(self) -> None:
        """Write what is queued."""
        if self.log is not None:
            self.log.close()


def _log(written: WrittenAnswers, max_bytes: int, engine: EngineClient) -> AnswerLog | None:
    if engine.own_directory is None:
        return None
    try:
        path = engine.own_directory / FILE_NAME
        return AnswerLog(path, written, max_bytes, engine.tokenizer.vocab_size, engine.supervisor)
    except StorageError as error:  # a server without a memory of answers is slower, no more
        logger.error("answers don't outlive this server: %s", error)
        return None
