"""Traces of requests: spans from HTTP to decode with cached tokens, under the client's traceparent."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from stemma.config.settings import Settings
from stemma.server.app import create_app
from stemma.server.observe.tracing import Tracing
from stemma.server.observe.watches import RequestRecord
from tests.server.scripted_engine import ScriptedEngine

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(spans: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Tracing(provider)


@pytest.fixture
async def traced(
    engine: ScriptedEngine, settings: Settings, tracing: Tracing
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, settings, tracing=tracing)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost"
    ) as client:
        yield client


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_traced_from_http_to_decode(
    traced: httpx.AsyncClient, spans: InMemorySpanExporter, stream: bool
) -> None:
    body = {"model": "scripted", "prompt": "one two three", "max_tokens": 4, "stream": stream}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    assert (await traced.post("/v1/completions", json=body)).status_code == 200
    spans.clear()
    assert (await traced.post("/v1/completions", json=body, headers=headers)).status_code == 200
    found = by_name(spans)
    assert set(found) == {"POST /v1/completions", "request", "queue", "prefill", "decode"}
    http, request = found["POST /v1/completions"], found["request"]
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    assert f"{http.parent.span_id:016x}" == PARENT
    assert http.attributes["http.response.status_code"] == 200
    assert request.parent.span_id == http.context.span_id
    assert request.attributes["stemma.cached_tokens"] == request.attributes["gen_ai.usage.input_tokens"] - 1
    assert request.attributes["stemma.cached_tokens.device"] > 0
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    for name in ("queue", "prefill", "decode"):
        assert found[name].parent.span_id == request.context.span_id
    assert found["queue"].end_time == found["prefill"].start_time
    assert found["prefill"].end_time <= found["decode"].end_time == request.end_time
    texts = str([(span.name, dict(span.attributes)) for span in found.values()])
    assert "one two" not in texts


async def test_malformed_parents_are_ignored_and_unsampled_ones_honoured(
    traced: httpx.AsyncClient, spans: InMemorySpanExporter
) -> None:
    body = {"model": "scripted", "prompt": "one", "max_tokens": 1}
    for bad in ("00-zz-1-01", "x" * 5000, f"00-{'0' * 32}-{PARENT}-01"):
        answer = await traced.post("/v1/completions", json=body, headers={"traceparent": bad})
        assert answer.status_code == 200
        assert by_name(spans)["POST /v1/completions"].parent is None
        spans.clear()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert (await traced.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert spans.get_finished_spans() == ()


async def test_refusals_and_failures_are_traced_and_other_planes_are_not(
    traced: httpx.AsyncClient, spans: InMemorySpanExporter, engine: ScriptedEngine
) -> None:
    body = {"model": "scripted", "prompt": "one", "max_tokens": 4}
    engine.script.fail_after = 1
    assert (await traced.post("/v1/completions", json=body)).status_code == 500
    found = by_name(spans)
    assert not found["POST /v1/completions"].status.is_ok
    assert found["request"].attributes["stemma.outcome"] == "error"
    spans.clear()
    assert (await traced.get("/health")).status_code == 200
    await traced.post("/admin/cache/lookup", json={})
    assert spans.get_finished_spans() == ()


def test_the_wait_for_lower_tiers_is_a_span(tracing: Tracing, spans: InMemorySpanExporter) -> None:
    record = RequestRecord(
        1, "r", "chat", "", "ok", 1000.0, 10, 2, 2.0, queue_s=0.5, load_s=0.2, first_token_s=1.0
    )
    tracing.record(record)
    found = by_name(spans)
    times = {
        name: ((span.start_time - 1000 * 10**9) / 1e9, (span.end_time - 1000 * 10**9) / 1e9)
        for name, span in found.items()
    }
    assert times == {
        "queue": (0.0, 0.3),
        "load": (0.3, 0.5),
        "prefill": (0.5, 1.0),
        "decode": (1.0, 2.0),
        "request": (0.0, 2.0),
    }


def test_spans_reach_a_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    tracing = Tracing.to_collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    tracing.record(RequestRecord(1, "the-id", "chat", "", "ok", 1000.0, 10, 2, 2.0))
    tracing.close()
    server.shutdown()
    server.server_close()
    (path, content) = received[0]
    assert path == "/v1/traces"
    assert b"the-id" in content
