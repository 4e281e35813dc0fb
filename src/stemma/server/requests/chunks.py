"""The bytes of a request's body as they come, bounded: all that a proxy needs of reading one."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from stemma.errors import BodyTooLarge, ClientDisconnected, WrongMediaType


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
