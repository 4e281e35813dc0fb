"""The ingress: OpenAI's API and the others in front of the replicas, the proxy of `routing/`.

A replica that dies, or that is late or silent (`patience.py`), before the client has received a byte is
replaced by another one, once; afterwards a stream ends with an error event (`routing/relay.py`). Nothing is
sent twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client.core import Metric
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from stemma.http import async_http_client
from stemma.model.load.located import located_model
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.door.access import Access
from stemma_router.cluster.health import Check
from stemma_router.cluster.replica_calls import RoutedCall
from stemma_router.cluster_file import ClusterFile
from stemma_router.replicas.metrics import gathered
from stemma_router.replicas.patience import Patience
from stemma_router.replicas.transport import CALL, ReplicaTransport
from stemma_router.routing.app import create_proxy_app
from stemma_router.routing.asking import PromptEncoder, ask_of, pooled_ask_of
from stemma_router.routing.checks import check
from stemma_router.routing.metrics import counters
from stemma_router.routing.prompts import POOLED, is_streamed
from stemma_router.routing.relay import (
    READ_TIMEOUT_S,
    Relay,
    RouteOptions,
    kept_headers,
    nobody_answers,
    path_of,
    read_body,
)

_log = logging.getLogger(__name__)

_BASE = "http://localhost"
"""Stands for all replicas: Ray Serve's router chooses one."""
_ATTEMPTS = 2
_MEET_EVERY_S = 1.0
_METRICS_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 3.0
_RETRIED = (502, 503, 504)
"""Answers of a replica that can't serve now."""


class Ingress:
    """The application of one Ray Serve deployment, in front of the handle of another."""

    def __init__(self, replicas: Any, cluster: ClusterFile) -> None:
        settings = cluster.settings
        self._block_size = settings.engine.cache.block_size
        model = located_model(settings.engine.model)
        self._encoder = PromptEncoder(Tokenizer(model.path, chat_template=model.chat_template))
        access = Access(settings.server)
        self._options = RouteOptions(
            settings.server.host,
            settings.server.max_body_bytes,
            access.admin_key,
            settings.server.body_memory,
            settings.server.answer_memory,
            access,
        )
        self._transport = ReplicaTransport(replicas)
        client = async_http_client(transport=self._transport, timeout=httpx.Timeout(READ_TIMEOUT_S))
        self.relay = Relay(client, self._options)
        self._patience = Patience(self._answers)
        self.num_requests = 0
        self.num_retries = 0
        """Requests that a second replica was asked for, since the first one failed before a byte was sent."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve: the application."""
        return create_proxy_app(self, self._options, self.all_metrics)

    @property
    def urls(self) -> tuple[str, ...]:
        """All servers, those first that can be asked now."""
        return (_BASE,)

    async def is_up(self) -> bool:
        """Return whether any server can be asked."""
        answer = await check(self.relay.client, _BASE)
        return answer is not None and answer[0] is Check.SERVES

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Get to know the replicas, beside the requests: the first one that comes is placed well."""
        meeting = asyncio.create_task(self._meet_replicas())
        try:
            yield
        finally:
            meeting.cancel()
            self._encoder.close()

    async def _meet_replicas(self) -> None:
        """Ask until a replica answers: then Ray Serve has made the router, which follows their events."""
        while not await self.is_up():
            await asyncio.sleep(_MEET_EVERY_S)

    def describe(self) -> dict[str, Any]:
        """Return the counters since the start, and what the router knows of each replica."""
        counts = {"num_requests": self.num_requests, "num_retries": self.num_retries}
        counts["num_broken_streams"] = self.relay.num_broken_streams
        router = self._transport.router
        return counts if router is None else {**counts, **router.describe()}

    def metrics(self) -> Iterable[Metric]:
        """Return what is counted, beside what the relay counts."""
        return counters(
            {
                "requests": ("Requests for text", self.num_requests),
                "retries": ("Requests that a second replica got", self.num_retries),
            }
        )

    async def all_metrics(self, request: Request) -> bytes:
        """Return what is counted here and by all replicas that the router knows, in Prometheus' format."""
        router, headers = self._transport.router, kept_headers(request)
        names = () if router is None else router.names()
        texts = await asyncio.gather(*(self._metrics_of(name, headers) for name in names))
        own = chain(self.relay.metrics(), self.metrics())
        here = serve.get_replica_context().replica_id.unique_id
        return gathered(own, here, dict(zip(names, texts, strict=True)))

    async def _metrics_of(self, name: str, headers: dict[str, str]) -> str | None:
        """Return the metrics of one replica; None: they can't be had."""
        routed = RoutedCall(only=name)
        try:
            async with asyncio.timeout(_METRICS_TIMEOUT_S):
                answer = await self.relay.ask(
                    f"{_BASE}/metrics", b"", headers, method="GET", extensions={CALL: routed}
                )
        except (httpx.HTTPError, TimeoutError):
            return None
        is_its_own = routed.replica is not None and getattr(routed.replica, "unique_id", "") == name
        return bytes(answer.body).decode() if is_its_own and answer.status_code == 200 else None

    async def generate(self, request: Request, content: bytes) -> Response:
        """Answer a request that generates; ask a second replica if the first one fails."""
        self.num_requests += 1
        body = await read_body(request, content)
        if request.scope["path"] in POOLED:
            ask = pooled_ask_of(body, self._block_size)
        else:
            ask = ask_of(body, await self._encoder.tokens(request.scope["path"], body), self._block_size)
        headers, url = kept_headers(request), _BASE + path_of(request)
        routed, streams = None, is_streamed(request.scope["path"], body)
        for attempt in range(_ATTEMPTS):
            routed = RoutedCall(ask=ask, avoid=None if routed is None else routed.replica)
            asking = asyncio.ensure_future(self.relay.ask(url, content, headers, extensions={CALL: routed}))
            try:
                if attempt == 0:
                    answer = await self._patience.answer_of(asking, routed, is_streamed=streams)
                else:
                    answer = await asking
            except httpx.HTTPError as error:
                _log.warning("%s", error)
                self.num_retries += attempt == 0
                continue
            if answer is None or (answer.status_code in _RETRIED and attempt == 0):
                self.num_retries += 1
                continue
            return answer
        return nobody_answers()

    async def _answers(self, name: str) -> bool:
        """Return whether a replica answers a check, or is gone: then its requests fail by themselves."""
        routed = RoutedCall(only=name)
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await self.relay.ask(f"{_BASE}/health", b"", {}, method="GET", extensions={CALL: routed})
        except TimeoutError:
            return False
        except httpx.HTTPError:
            return True
        return True
