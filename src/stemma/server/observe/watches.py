"""Requests as the server sees them: times, what the cache gave, how they ended; and who wants to know.

A watch follows one request from arrival to its last output. It feeds the metrics; when it is over, its record
goes to the observers: the log, traces. The last records and the requests under way are kept for the
operator's pages. No text is kept. Used on the event loop only.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from stemma.engine.api import CacheReport, GenerationRequest
from stemma.server.observe.collected import Collected, TurnObserver
from stemma.server.observe.lately import Lately
from stemma.server.observe.metrics import ServerMetrics, cached_share
from stemma.types import FinishReason

MAX_RECORDS = 2048


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that is over. Times are seconds since its arrival."""

    number: int
    """Counts requests that ended; the first is 1."""
    request_id: str
    api: str
    tenant: str
    """Empty: there are no tenants."""
    outcome: str
    """``ok``, ``error``, ``refused`` or ``aborted``."""
    arrived_at: float
    """Seconds since 1970."""
    num_prompt_tokens: int
    num_generated_tokens: int
    total_s: float
    cache: CacheReport | None = None
    """None: it never started."""
    finish_reason: FinishReason | None = None
    """How its first sequence ended."""
    queue_s: float | None = None
    """Until its first step; includes `load_s`."""
    load_s: float = 0.0
    """The part of that which was a wait for lower tiers."""
    first_token_s: float | None = None
    x_request_id: str = ""
    """The id of the HTTP request that it came with."""
    trace_context: object = None
    """The value that `Watches.capture` returned when it arrived."""


@dataclass(slots=True)
class TenantSums:
    """Tokens that the requests of a tenant were given so far, of those that started."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


Observer = Callable[[RequestRecord], None]


class Watches:
    """The requests under way, the last that ended, and the observers of a server."""

    def __init__(self, metrics: ServerMetrics, wall: Callable[[], float] = time.time) -> None:
        """`wall` gives seconds since 1970."""
        self.metrics = metrics
        self.wall = wall
        self.lately = Lately()
        self.observers: list[Observer] = []
        self.capture: Callable[[], object] = lambda: None
        """Returns the trace context that a request arrives in."""
        self.running: dict[str, RequestWatch] = {}
        self.records: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)
        """Oldest first."""
        self.num_pages = 0
        """Pages that watch this server."""
        self.numbers = itertools.count(1)
        self.tenants: dict[str, TenantSums] = {}
        """By name, one for each tenant that has asked; empty name: no tenants."""

    def watch(self, request: GenerationRequest, api: str, x_request_id: str = "") -> RequestWatch:
        """Start the clock for a request that came in over `api` (``chat``, ``completions``, ``tgi``...)."""
        watch = RequestWatch(self, request, api, x_request_id)
        self.running[request.request_id] = watch
        return watch

    def ended(self, record: RequestRecord) -> None:
        """Keep a record and tell the observers."""
        self.running.pop(record.request_id, None)
        self.records.append(record)
        for observer in self.observers:
            observer(record)


class RequestWatch(TurnObserver):
    """Times one request."""

    def __init__(self, watches: Watches, request: GenerationRequest, api: str, x_request_id: str) -> None:
        self._watches = watches
        self._metrics = watches.metrics
        self.request = request
        self.api = api
        self._trace_context = watches.capture()
        self._x_request_id = x_request_id
        self.arrived_at = watches.wall()
        """Seconds since 1970."""
        self._arrived = self._metrics.clock()
        self._metrics.arrived(api)
        self._first: float | None = None
        self.so_far: Collected | None = None
        """The answer as far as it has come; None: it waits."""

    @property
    def age_s(self) -> float:
        """Seconds since its arrival."""
        return self._metrics.clock() - self._arrived

    def began(self, so_far: Collected) -> None:
        """Count what it was given."""
        self.so_far = so_far
        owner, cache = self.request.namespace.owner, so_far.cache
        self._metrics.started(owner, cache)
        lately = self._watches.lately
        lately.count("prompt", amount=cache.num_prompt_tokens)
        for tier, count in cache.cached_by_tier.items():
            lately.count("cached", tier.value, amount=count)
        sums = self._watches.tenants.setdefault(owner, TenantSums())
        sums.requests += 1
        sums.prompt_tokens += cache.num_prompt_tokens
        sums.cached_tokens += cache.num_cached_tokens

    def spoke(self, so_far: Collected) -> None:
        """Time its first token."""
        self._first = self._metrics.clock()
        first_token_s = self._first - self._arrived
        self._metrics.ttft.observe(first_token_s)
        self._watches.lately.time("first_token", first_token_s)
        self._metrics.ttft_by_share.labels(cached_share(so_far.cache)).observe(first_token_s)
        self._metrics.queue_wait.observe(so_far.queue_wait_s)
        self._metrics.prefill.observe(max(0.0, first_token_s - so_far.queue_wait_s))

    def ended(self, so_far: Collected, outcome: str) -> None:
        """Record how it ended."""
        metrics, started = self._metrics, self.so_far is not None
        metrics.requests.labels(self.api, outcome).inc()
        self._watches.lately.count("ended", outcome)
        now = metrics.clock()
        reasons = [one.finish_reason for one in so_far.sequences]
        for reason in reasons:
            if reason is not None:
                metrics.finished.labels(reason.value).inc()
        if outcome == "ok" and started:
            self._observe_whole(so_far, now)
        self._watches.ended(
            RequestRecord(
                number=next(self._watches.numbers),
                request_id=self.request.request_id,
                api=self.api,
                tenant=self.request.namespace.owner,
                outcome=outcome,
                arrived_at=self.arrived_at,
                num_prompt_tokens=len(self.request.prompt_token_ids),
                num_generated_tokens=so_far.num_generated_tokens,
                total_s=now - self._arrived,
                cache=so_far.cache if started else None,
                finish_reason=reasons[0] if reasons else None,
                queue_s=so_far.queue_wait_s if started else None,
                load_s=so_far.load_s,
                first_token_s=None if self._first is None else self._first - self._arrived,
                x_request_id=self._x_request_id,
                trace_context=self._trace_context,
            )
        )

    def _observe_whole(self, answer: Collected, now: float) -> None:
        metrics = self._metrics
        metrics.e2e.observe(now - self._arrived)
        metrics.seat.observe(max(0.0, now - self._arrived - answer.queue_wait_s))
        metrics.answer_tokens.observe(answer.num_generated_tokens)
        metrics.prompt_tokens.observe(answer.cache.num_prompt_tokens)
        metrics.generated_tokens.observe(answer.num_generated_tokens)
        if self._first is not None:
            metrics.decode.observe(now - self._first)
            if answer.num_generated_tokens > 1:
                gap_s = (now - self._first) / (answer.num_generated_tokens - 1)
                metrics.tpot.observe(gap_s)
                self._watches.lately.time("token", gap_s)
                metrics.gap.observe(gap_s)
