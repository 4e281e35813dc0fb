"""Requests that were refused: a line of the request log, a counter, and the last ones for the operator.

A request that the engine never saw leaves no other trace. Messages hold short names, never a prompt.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request

from stemma.errors import EngineFailed, GenerationFailed, InvalidRequest, StemmaError
from stemma.server.door.caller import caller
from stemma.server.observe.lately import Lately
from stemma.server.observe.request_log import log_refusal

MAX_REFUSALS = 256
_MAX_MESSAGE_CHARS = 500
_MAX_FIELD_CHARS = 128
_MAX_CLIENT_CHARS = 128
_HUMP = re.compile(r"(?<!^)(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused request."""

    at: float
    """Seconds since 1970."""
    route: str
    """The path as it was declared: one of ours."""
    reason: str
    """The kind of error, e.g. ``invalid_request``."""
    status: int
    field: str
    """The request's field that is wrong; empty: none is."""
    message: str
    client: str
    """What it calls itself (`User-Agent`)."""
    tenant: str
    x_request_id: str

    @classmethod
    def of(cls, request: Request, error: StemmaError, route: str, status: int) -> Refusal:
        """Return the note of `request`, which `error` refused."""
        field = error.param if isinstance(error, InvalidRequest) else None
        return cls(
            at=time.time(),
            route=route,
            reason=_HUMP.sub("_", type(error).__name__).lower(),
            status=status,
            field=(field or "")[:_MAX_FIELD_CHARS],
            message=str(error)[:_MAX_MESSAGE_CHARS],
            client=request.headers.get("user-agent", "")[:_MAX_CLIENT_CHARS],
            tenant=caller().tenant,
            x_request_id=caller().x_request_id,
        )


class Refusals(Collector):
    """Of one server. Used on the event loop but for `collect`."""

    def __init__(self, lately: Lately, *, logs: bool) -> None:
        """`logs`: each is a line of the request log."""
        self._logs, self._lately = logs, lately
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._last: deque[Refusal] = deque(maxlen=MAX_REFUSALS)

    def note(self, request: Request, error: StemmaError, route: str, status: int) -> None:
        """Note that `error` ended `request` on `route`; failures of the server are none of ours."""
        if isinstance(error, EngineFailed | GenerationFailed):
            return
        refusal = Refusal.of(request, error, route, status)
        self._last.append(refusal)
        self._lately.count("refused", refusal.tenant, refusal.reason)
        with self._lock:
            self._counts[route, refusal.reason] += 1
        if self._logs and not caller().is_logged:
            log_refusal(refusal.route, refusal.status, refusal.reason, refusal.field, refusal.tenant)

    def last(self) -> list[dict[str, Any]]:
        """Return the last ones, the newest first."""
        return [asdict(one) for one in reversed(self._last)]

    def collect(self) -> Iterable[Metric]:
        """Yield the one family."""
        family = CounterMetricFamily(
            "stemma_requests_refused", "Refused requests by route and reason", labels=["route", "reason"]
        )
        with self._lock:
            counts = dict(self._counts)
        for labels, count in sorted(counts.items()):
            family.add_metric(list(labels), count)
        yield family
