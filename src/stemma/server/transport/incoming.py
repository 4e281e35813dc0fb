"""What comes from a client: the bytes of a body, bounded, and the news that it has left.

Proxies read bodies here, so nothing of the model is imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from stemma.errors import BodyTooLarge, ClientDisconnected, WrongMediaType

T = TypeVar("T")


async def until_disconnected(receive: Receive) -> None:
    """Return when the client closes the connection. The request body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client leaves first, cancel it and raise ClientDisconnected."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected("the client closed the connection")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def limited_chunks(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yield the body as it comes; raise BodyTooLarge beyond `limit` bytes, at once if it is declared.

    Raises WrongMediaType for a compressed body.
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise WrongMediaType(f"send the body as it is, not with 'Content-Encoding: {coding[:32]}'")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge(f"the body has {declared} bytes; the limit is {limit}")
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise BodyTooLarge(f"the body exceeds the limit of {limit} bytes")
            yield chunk
    except ClientDisconnect as error:
        raise ClientDisconnected("the client left while sending its request") from error
