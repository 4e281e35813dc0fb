"""Checks of a fleet's servers, beside their requests: does each answer, and does it serve?"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx
import orjson

from stemma.cluster.fleet import Fleet
from stemma.cluster.health import Check

CHECK_EVERY_S = 2.0
_TIMEOUT_S = 3.0
_AT_ONCE = 3
"""Checks of a silent server that follow each other at once: it is lost soon, or answers again."""
_LATE_S = 1.0
"""Beyond the timeout: then this process itself hung, and what it found says nothing of a server."""


_MOST_TOLD_BYTES = 4096
_SLOWEST_S = 60.0
"""A server that claims more time for a token isn't believed."""


@dataclass(frozen=True, slots=True)
class Told:
    """The finding of a check."""

    found: Check
    decode_s_per_token: float | None = None
    """The slowest gap between tokens, if the server tells."""


async def check(client: httpx.AsyncClient, url: str) -> Told | None:
    """Ask a server's `/health`; return what it says, or None if this process was too busy to know.

    A server without that path serves if it answers at all.
    """
    begun = time.monotonic()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await client.get(f"{url}/health", timeout=_TIMEOUT_S)
    except (httpx.HTTPError, TimeoutError):
        return Told(Check.SILENT) if time.monotonic() - begun < _TIMEOUT_S + _LATE_S else None
    if answer.status_code >= 500:
        return Told(Check.REFUSES)
    return Told(Check.SERVES, _decode_s_per_token(answer.content))


def _decode_s_per_token(content: bytes) -> float | None:
    """Return what Stemma's `/health` tells; other servers' have no such thing."""
    if len(content) > _MOST_TOLD_BYTES:
        return None
    try:
        told = orjson.loads(content)["decode_s_per_token"]
    except (ValueError, KeyError, TypeError):
        return None
    return told if isinstance(told, float) and 0.0 < told <= _SLOWEST_S else None


async def keep_checking(fleet: Fleet, client: httpx.AsyncClient) -> None:
    """Check each server every two seconds, one apart from the others, until cancelled."""
    checking: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            urls = dict.fromkeys(member.url for member in fleet.members)
            for url in [url for url in checking if url not in urls or checking[url].done()]:
                checking.pop(url).cancel()
            for url in urls:
                if url not in checking:
                    checking[url] = asyncio.create_task(_check_one(fleet, client, url))
            await asyncio.sleep(CHECK_EVERY_S)
    finally:
        for task in checking.values():
            task.cancel()


async def _check_one(fleet: Fleet, client: httpx.AsyncClient, url: str) -> None:
    for _ in range(_AT_ONCE):
        told = await check(client, url)
        if told is not None:
            fleet.note_check(url, told.found, told.decode_s_per_token)
        if told is None or told.found is not Check.SILENT:
            return
