"""Checks of a fleet's servers, beside their requests: does each answer, and does it serve?"""

from __future__ import annotations

import asyncio
import time

import httpx

from stemma.told import NOTHING, Told, read_told
from stemma_router.cluster.fleet import Fleet
from stemma_router.cluster.health import Check

CHECK_EVERY_S = 2.0
_TIMEOUT_S = 3.0
_AT_ONCE = 3
"""Checks of a silent server that follow each other at once: it is lost soon, or answers again."""
_LATE_S = 1.0
"""Beyond the timeout: then this process itself hung, and what it found says nothing of a server."""


async def check(client: httpx.AsyncClient, url: str) -> tuple[Check, Told] | None:
    """Ask a server's `/health`; return what it says, or None if this process was too busy to know.

    A server without that path serves if it answers at all.
    """
    begun = time.monotonic()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await client.get(f"{url}/health", timeout=_TIMEOUT_S)
    except (httpx.HTTPError, TimeoutError):
        return (Check.SILENT, NOTHING) if time.monotonic() - begun < _TIMEOUT_S + _LATE_S else None
    if answer.status_code >= 500:
        return Check.REFUSES, NOTHING
    return Check.SERVES, read_told(answer.content)


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
        answer = await check(client, url)
        if answer is None:
            return
        found, told = answer
        fleet.note_check(url, found, told)
        if found is not Check.SILENT:
            return
