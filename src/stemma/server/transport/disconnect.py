"""Noticing that a client has left while its request is still running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from stemma.errors import ClientDisconnected

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
