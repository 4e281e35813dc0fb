"""Clients that ask a router many things at once, and say how it went."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx


async def ask(client: httpx.AsyncClient, url: str, number: int) -> str:
    """Return `ok`, or what was wrong."""
    streams = number % 2 == 0
    body = {"prompt": [number, *range(100)], "stream": streams}
    try:
        answer = await client.post(f"{url}/v1/completions", json=body)
    except httpx.HTTPError as error:
        return type(error).__name__
    if answer.status_code != 200:
        return str(answer.status_code)
    if streams:
        return "ok" if answer.text.count("pid") == 3 and "error" not in answer.text else "broken stream"
    return "ok" if "pid" in answer.json() else "wrong answer"


async def ask_many(url: str, count: int, at_once: int = 8, first: int = 0) -> Counter[str]:
    """Send requests with different prompts; return how they ended."""
    numbers = iter(range(first, first + count))
    ended: Counter[str] = Counter()
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:

        async def one_after_the_other() -> None:
            for number in numbers:
                ended[await ask(client, url, number)] += 1

        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return ended
