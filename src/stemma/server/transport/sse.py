"""Server-sent events: one response class that stops, and closes its source, as soon as the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol
from uuid import uuid4

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stemma.errors import StemmaError
from stemma.server.errors import ErrorShape
from stemma.server.transport.incoming import until_disconnected
from stemma.server.transport.outgoing import PIECE_BYTES, send_in_pieces
from stemma.server.transport.planes import DIRECT_SEND

DONE = b"data: [DONE]\n\n"


def event(body: Any, name: str | None = None) -> bytes:
    """Return one event that carries `body` as JSON; `name` is its type, for APIs that give one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(body) + b"\n\n"


def told_as(shape: ErrorShape, end: bytes = b"") -> Callable[[StemmaError], bytes]:
    """Return what writes an error as an event in `shape`, and `end` behind it."""
    return lambda error: event(shape.body(error)) + end


class TextEvent:
    """Events whose JSON differs in one string alone: the rest of it is written once."""

    def __init__(self, body: Callable[[str], Any]) -> None:
        """`body` returns what an event with this string carries."""
        mark = uuid4().hex  # in nothing else that the body holds
        self._head, self._tail = event(body(mark)).split(orjson.dumps(mark))

    def __call__(self, text: str) -> bytes:
        """Return the event with `text`."""
        return self._head + orjson.dumps(text) + self._tail


class Outputs(Protocol):
    """What a stream is made of, beside the chunks that tell of it."""

    async def aclose(self) -> None:
        """End it; safe to call at any time."""

    @property
    def quiet_s(self) -> float:
        """Seconds without a chunk after which `waiting` is sent; 0: never."""

    def waiting(self) -> bytes:
        """Return what tells a client and the proxies before it that the server is at work; may be nothing."""


class EventStream(Response):
    """Sends the chunks of `source` as they come, until it ends or the client leaves.

    If an error ends it early, `told` writes the last chunk.

    `outputs`, which `source` may read, is closed in any case: a generator that was never started would not
    run its own cleanup. It also says what is sent while there is nothing to tell: proxies give up connections
    that are silent for a minute, and a long prompt takes longer.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        outputs: Outputs | None = None,
        headers: Mapping[str, str] | None = None,
        told: Callable[[StemmaError], bytes] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._source = source
        self._outputs = outputs
        self._told = told
        self._was_quiet = True
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def aclose(self) -> None:
        """End without sending anything."""
        await self._source.aclose()
        if self._outputs is not None:
            await self._outputs.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 (ASGI's own signature)
        pump = asyncio.ensure_future(self._pump(send, scope.get(DIRECT_SEND, send)))
        gone = asyncio.ensure_future(until_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, gone):
                task.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
            if self._outputs is not None:
                await self._outputs.aclose()
        if not pump.cancelled():
            pump.result()

    async def _pump(self, send: Send, direct_send: Send) -> None:
        async with aclosing(self._source) as source:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            waiting = asyncio.ensure_future(self._fill_silence(direct_send))
            try:
                async for chunk in source:
                    self._was_quiet = False
                    if len(chunk) > PIECE_BYTES:
                        message = {"type": "http.response.body", "body": chunk, "more_body": True}
                        await send_in_pieces(direct_send, message)
                        continue
                    # Middlewares look at the start of a response alone, and each costs a call a token.
                    await direct_send({"type": "http.response.body", "body": chunk, "more_body": True})
            except StemmaError as error:
                if self._told is None:
                    raise
                told = self._told(error)
                await direct_send({"type": "http.response.body", "body": told, "more_body": True})
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fill_silence(self, send: Send) -> None:
        """Send what `outputs` has to say while it waits, whenever nothing else was sent for a while."""
        outputs = self._outputs
        while outputs is not None and outputs.quiet_s:
            self._was_quiet = True
            await asyncio.sleep(outputs.quiet_s)
            if self._was_quiet and (chunk := outputs.waiting()):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
