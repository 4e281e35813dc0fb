"""OpenTelemetry traces of requests: HTTP, then queue, load, prefill and decode. Needs the extra `otel`.

A client's W3C ``traceparent`` becomes the parent of the HTTP span, and decides whether the trace is sampled.
The spans below are made when a request ends, from its record: nothing is traced on the step loop. They carry
counts and reasons, never text.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stemma import __version__
from stemma.errors import ConfigError
from stemma.server.observe.watches import RequestRecord
from stemma.server.transport.planes import Plane, plane_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_MAX_PATH_CHARS = 200
_NS = 1_000_000_000
_INSTALL = "traces need OpenTelemetry: pip install 'stemma-llm[otel]'"
_HTTP_ERROR = 500


class Tracing:
    """Makes the spans of one server. `provider` says where they go."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("stemma", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self._context = context

    @classmethod
    def to_collector(cls, endpoint: str) -> Tracing:
        """Return tracing that sends to an OTLP collector over HTTP, e.g. ``http://127.0.0.1:4318/v1/traces``.

        Raises ConfigError if the packages are missing.
        """
        try:
            import requests  # the exporter's own
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(_INSTALL) from error
        provider = TracerProvider(resource=Resource.create({"service.name": "stemma"}))
        session = requests.Session()
        session.trust_env = False  # as all our calls (http.py)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, session=session)))
        return cls(provider)

    def capture(self) -> Context:
        """Return the trace context of the code that runs now: that of the HTTP span."""
        return self._context.get_current()

    def record(self, record: RequestRecord) -> None:
        """Make the spans of a request that is over."""
        parent: Any = record.trace_context
        began = record.arrived_at
        span = self._tracer.start_span(
            "request", parent, attributes=_attributes(record), start_time=_ns(began)
        )
        inside = self._trace.set_span_in_context(span, parent)
        end = began + record.total_s
        first = end if record.first_token_s is None else began + record.first_token_s
        # Two threads measured these: the step loop the queue, the event loop the rest.
        started = end if record.queue_s is None else min(began + record.queue_s, first)
        loading = max(began, started - record.load_s)
        self._child("queue", inside, began, loading)
        if record.load_s:
            self._child("load", inside, loading, started)
        if record.queue_s is not None:
            cache = record.cache
            cached = {} if cache is None else {"stemma.cached_tokens": cache.num_cached_tokens}
            self._child("prefill", inside, started, first, cached)
        if record.first_token_s is not None:
            tokens = {"gen_ai.usage.output_tokens": record.num_generated_tokens}
            self._child("decode", inside, first, end, tokens)
        if record.outcome == "error":
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(_ns(end))

    def _child(
        self, name: str, inside: Context, start: float, end: float, attributes: dict[str, int] | None = None
    ) -> None:
        span = self._tracer.start_span(name, inside, attributes=attributes, start_time=_ns(start))
        span.end(_ns(max(start, end)))

    def start_http_span(self, path: str, headers: dict[str, str]) -> Span:
        """Begin the span of a POST; `headers` may name its parent."""
        return self._tracer.start_span(
            f"POST {path}",
            self._propagator.extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": "POST", "url.path": path},
        )

    def note_status(self, span: Span, status: int) -> None:
        """Note the status of the answer that a span is of."""
        span.set_attribute("http.response.status_code", status)
        if status >= _HTTP_ERROR:
            span.set_status(self._trace.StatusCode.ERROR)

    def within(self, span: Span) -> AbstractContextManager[Span]:
        """Make a span the current one of the code inside; it ends with it."""
        return self._trace.use_span(span, end_on_exit=True)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class TracingMiddleware:
    """Makes the HTTP span of each request for text, and the current one of the code below."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call of ASGI."""
        is_traced = scope["type"] == "http" and scope["method"] == "POST"
        if not is_traced or plane_of(scope["path"]) is not Plane.BUSINESS:
            await self._app(scope, receive, send)
            return
        tracing = self._tracing
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"][:_MAX_PATH_CHARS]
        span = tracing.start_http_span(path, headers)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                tracing.note_status(span, message["status"])
            await send(message)

        with tracing.within(span):
            await self._app(scope, receive, noted)


def _attributes(record: RequestRecord) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {
        "stemma.request_id": record.request_id,
        "stemma.x_request_id": record.x_request_id,
        "stemma.api": record.api,
        "stemma.outcome": record.outcome,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_generated_tokens,
    }
    if record.tenant:
        found["stemma.tenant"] = record.tenant
    if record.finish_reason is not None:
        found["stemma.finish_reason"] = record.finish_reason.value
    if record.cache is not None:
        found["stemma.cached_tokens"] = record.cache.num_cached_tokens
        found |= {f"stemma.cached_tokens.{t.value}": n for t, n in record.cache.cached_by_tier.items()}
        if record.cache.miss_reason is not None:
            found["stemma.miss_reason"] = record.cache.miss_reason
    return found


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
