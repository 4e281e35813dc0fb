"""Replicas behind the interface of an HTTP client, so that the ingress is the proxy of `routing/`.

A replica that dies is `httpx.RemoteProtocolError`, as a server that closes the connection is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import ray
from ray.serve.exceptions import RayServeException

from stemma_router.cluster.replica_calls import CallRouter, ReplicaCall, RoutedCall

CALL = "stemma_call"
"""Request extension: the `RoutedCall`, whose `call` is filled in here."""
_DROPPED = (b"host", b"connection", b"accept-encoding", b"transfer-encoding", b"user-agent")


class ReplicaTransport(httpx.AsyncBaseTransport):
    """Sends requests to the replicas of a Ray Serve deployment handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="answer", stream=True)
        self.router: CallRouter | None = None
        """The router of the handle, once it has placed a request; None for one of Ray's own."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request to its replica, and return the answer as it comes."""
        routed = request.extensions.get(CALL) or RoutedCall()
        kept = tuple(
            (name.lower(), value) for name, value in request.headers.raw if name.lower() not in _DROPPED
        )
        path = request.url.raw_path.decode("ascii")
        routed.call = ReplicaCall(request.method, path, kept, await request.aread())
        answer = self._handle.remote(routed)
        stream = _Answer(answer, routed)
        try:
            status, answer_headers = await anext(answer)
            self.router = routed.router or self.router
        except BaseException as error:
            await stream.aclose()
            if isinstance(error, ray.exceptions.RayError | RayServeException | StopAsyncIteration):
                raise httpx.RemoteProtocolError(_reason(error), request=request) from error
            raise
        return httpx.Response(status, headers=answer_headers, stream=stream, request=request)


class _Answer(httpx.AsyncByteStream):
    """The body of an answer."""

    def __init__(self, answer: Any, routed: RoutedCall) -> None:
        self._answer = answer
        self._routed = routed
        self._is_whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._answer:
                self._routed.note_first_token()
                yield chunk
            self._is_whole = True
        except (ray.exceptions.RayError, RayServeException) as error:
            raise httpx.RemoteProtocolError(_reason(error)) from error

    async def aclose(self) -> None:
        """End the request on its replica if it still runs."""
        if not self._is_whole:
            self._answer.cancel()
        self._routed.end()


def _reason(error: BaseException) -> str:
    return f"a replica went away ({type(error).__name__})"
