"""The HTTP front of several models: a request goes to the model that it names, which is loaded for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import orjson
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import StemmaError
from stemma.server.door.caller import caller
from stemma.server.errors import json_response, openai_error
from stemma.server.transport.headers import Entrance
from stemma.server.transport.sse import EventStream, told_as
from stemma_router.models.loaded import Model, Models, State
from stemma_router.routing.metrics import render
from stemma_router.routing.relay import (
    Relay,
    Relayed,
    RouteOptions,
    kept_headers,
    nobody_answers,
    path_of,
    read_body,
)

_LOOK_TIMEOUT_S = 5.0
_COMMENT_S = 2.0
"""Between two comments of a stream whose model is being loaded."""


class Front:
    """Passes requests on to the models that they name."""

    def __init__(
        self, models: Models, aliases: Mapping[str, str], relay: Relay, admin_key: str | None
    ) -> None:
        """`aliases`: further names of models. Raises UnknownModel for an alias of none."""
        self._models = models
        self._aliases = dict(aliases)
        for name in aliases.values():
            models.find(name)
        self._relay = relay
        self._admin_key = admin_key
        self._default = next(iter(models.by_name))

    async def answer(self, request: Request) -> Response:
        """Answer any path of the API."""
        return await self._relay.answered(request, self._answered)

    async def _answered(self, request: Request, content: bytes) -> Response:
        body = await read_body(request, content) if content else {}
        if "model" not in body and request.method != "POST":
            # Things that a server stored, and its pages: whichever has them.
            urls = tuple(one.server.url for one in self._models.loaded if one.server is not None)
            return await self._relay.first_of(request, content, urls) if urls else nobody_answers()
        model, content = self._chosen(body, content)
        path, headers = path_of(request), kept_headers(request)
        if body.get("stream") is True and model.state is not State.LOADED:
            one = caller()  # the body waits for the load: it counts until the answer's end
            one.holding.take(self._relay.bodies, len(content), one.tenant)
            told = self._told(model, request.method, path, content, headers)
            return EventStream(told, told=told_as(openai_error))
        return await self._asked(model, request.method, path, content, headers)

    def _chosen(self, body: dict[str, Any], content: bytes) -> tuple[Model, bytes]:
        """Return the model that a request means, and its body in that model's name. Raises UnknownModel."""
        given = body.get("model")
        named = given if isinstance(given, str) and given else self._default
        model = self._models.find(self._aliases.get(named, named))
        if named == model.name:
            return model, content
        return model, orjson.dumps({**body, "model": model.name})

    async def _asked(
        self, model: Model, method: str, path: str, content: bytes, headers: dict[str, str]
    ) -> Response:
        url = await self._models.acquire(model)
        try:
            answer = await self._relay.ask(url + path, content, headers, method=method)
        except httpx.HTTPError:
            self._models.release(model)
            return nobody_answers()
        except BaseException:  # the client left
            self._models.release(model)
            raise
        if isinstance(answer, Relayed):
            answer.when_over = lambda: self._models.release(model)
        else:
            self._models.release(model)
        return answer

    async def _told(
        self, model: Model, method: str, path: str, content: bytes, headers: dict[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """Yield comments on the load, then the answer's events; an error is an event, too."""
        asking = asyncio.ensure_future(self._asked(model, method, path, content, headers))
        try:
            while not asking.done():
                yield f": {model.name} is {model.state}\n\n".encode()
                await asyncio.wait([asking], timeout=_COMMENT_S)
            answer = asking.result()
            if not isinstance(answer, Relayed):
                yield b"data: " + bytes(answer.body).replace(b"\n", b" ") + b"\n\n"
                return
            async for chunk in answer.body_iterator:
                yield chunk if isinstance(chunk, bytes) else bytes(str(chunk), "utf-8")
        finally:
            await _end(asking)

    async def list_models(self, request: Request) -> Response:
        """All models with their states, and the aliases."""

        async def listed(request: Request, _content: bytes) -> Response:
            await asyncio.gather(*(self._learn(one, kept_headers(request)) for one in self._models.loaded))
            return json_response({"object": "list", "data": self._cards()})

        return await self._relay.answered(request, listed)

    async def _learn(self, model: Model, headers: dict[str, str]) -> None:
        """Ask a model's server once what it reads, as the one who asks for the list."""
        if model.input_modalities or model.server is None:
            return
        with suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                url = f"{model.server.url}/v1/models"
                answer = await self._relay.ask(url, b"", headers, method="GET")
            model.input_modalities = _modalities_in(answer)

    def _cards(self) -> list[dict[str, Any]]:
        cards = [
            {
                "id": one.name,
                "object": "model",
                "created": 0,
                "owned_by": "stemma",
                "state": one.state.value,
                "requests": one.num_under_way,
                "waiting": one.num_waiting,
                "loads": one.num_loads,
                "load_s": round(one.load_s, 1) if one.num_loads else None,
                **({"input_modalities": list(one.input_modalities)} if one.input_modalities else {}),
            }
            for one in self._models.by_name.values()
        ]
        by_name = {card["id"]: card for card in cards}
        return cards + [{**by_name[name], "id": alias, "root": name} for alias, name in self._aliases.items()]

    async def health(self, _request: Request) -> Response:
        """Up as long as this process is: models come and go."""
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """For whoever has the admin key; without one, for this machine."""
        try:
            self._relay.check_operator(request, self._admin_key)
        except StemmaError as error:
            return openai_error(error)
        return Response(render(self._relay.metrics(), self._gauges()), media_type=CONTENT_TYPE_LATEST)

    def _gauges(self) -> Iterable[Metric]:
        loaded = GaugeMetricFamily("stemma_models_loaded", "1 while a model is loaded", labels=["model"])
        loads = GaugeMetricFamily("stemma_models_loads", "Loads since the start", labels=["model"])
        under_way = GaugeMetricFamily("stemma_models_requests", "Requests under way", labels=["model"])
        for one in self._models.by_name.values():
            loaded.add_metric([one.name], one.state is State.LOADED)
            loads.add_metric([one.name], one.num_loads)
            under_way.add_metric([one.name], one.num_under_way)
        return loaded, loads, under_way


def _modalities_in(answer: Response) -> tuple[str, ...]:
    """Return what the first card of a server's list says that its model reads; empty: nothing."""
    try:
        given = orjson.loads(bytes(answer.body))["data"][0]["input_modalities"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ()
    return tuple(one for one in given if isinstance(one, str)) if isinstance(given, list) else ()


async def is_well(client: httpx.AsyncClient, url: str) -> bool:
    """Return whether a server answers that it is; one that is busy does, one that hangs doesn't."""
    try:
        return (await client.get(f"{url}/health", timeout=_LOOK_TIMEOUT_S)).is_success
    except httpx.HTTPError:
        return False


async def _end(asking: asyncio.Future[Response]) -> None:
    """End what a client that left, or an error, leaves open. What is awaited here may be cancelled."""
    if not asking.done():
        asking.cancel()  # it gives its place back by itself
    elif not asking.cancelled() and asking.exception() is None:
        answer = asking.result()
        if isinstance(answer, Relayed):
            answer.when_over()
            await answer.drop()


def create_models_app(front: Front, models: Models, relay: Relay) -> FastAPI:
    """Return the application; at its end all models are stopped."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        looking = asyncio.create_task(models.keep_looking())
        try:
            yield
        finally:
            looking.cancel()
            await models.close()
            await relay.client.aclose()

    app = FastAPI(title="Stemma models", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.add_middleware(Entrance)
    app.add_route("/health", front.health, methods=["GET"])
    app.add_route("/metrics", front.metrics, methods=["GET"])
    app.add_route("/v1/models", front.list_models, methods=["GET"])
    app.add_route("/{path:path}", front.answer, methods=["GET", "POST", "DELETE", "PUT"])
    return app


def make_front(models: Models, aliases: Mapping[str, str], relay: Relay, options: RouteOptions) -> FastAPI:
    """Return the application in front of `models`. Raises UnknownModel for an alias of none."""
    relay.ask_for_keys(lambda: [one.server.url for one in models.loaded if one.server is not None])
    return create_models_app(Front(models, aliases, relay, options.admin_key), models, relay)
