"""A server behind the proxies that does as a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from stemma_router.routing.prompts import GENERATING, POOLED

BINARY = "inference-header-content-length"


class Upstream:
    """A server that records bodies and answers, fails, or breaks off."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.hangs = False
        self.pause_s = 0.0
        """Before each answer."""
        self.num_left = 0
        """Requests that hung until their client left."""
        self.status = 200
        self.error: dict[str, Any] = {}
        """Stands beside the name in answers of other statuses than 200."""
        self.break_after: int | None = None
        """Events after which the connection is cut; 0: before the first."""
        app = FastAPI()
        app.add_route("/v1/completions", self._generate, methods=["POST"])
        for path in (*GENERATING[1:], *POOLED):
            app.add_route(path, self._generate, methods=["POST"])
        app.add_route("/v1/responses/{id}", self._stored, methods=["GET", "DELETE"])
        app.add_route("/v1/models", self._models, methods=["GET"])
        app.add_route("/health", lambda _: PlainTextResponse("ok"), methods=["GET"])
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(5)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"served_by": self.name, "query": request.url.query})

    async def _generate(self, request: Request) -> Response:
        body = {} if BINARY in request.headers else await request.json()
        self.bodies.append(body)
        self.paths.append(request.url.path)
        if self.hangs:
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            self.num_left += 1
        self.headers.append(dict(request.headers))
        await asyncio.sleep(self.pause_s)
        if body.get("stream") or request.url.path.endswith("_stream"):
            return StreamingResponse(self._events(), self.status, media_type="text/event-stream")
        if self.break_after is not None:
            return StreamingResponse(self._events(), self.status, media_type="application/json")
        said = {"served_by": self.name, **(self.error if self.status != 200 else {})}
        return JSONResponse(said, self.status, {"x-stemma-cached-tokens": "7"})

    async def _stored(self, request: Request) -> Response:
        return JSONResponse({"served_by": self.name}, self.status)

    async def _events(self) -> AsyncIterator[bytes]:
        for number in range(3):
            if number == self.break_after:
                raise ConnectionError("cut")
            yield f"data: {self.name} {number}\n\n".encode()
