"""What preparing turns in idle time costs a busy server: `python -m benchmarks.preparation [--rounds N]`.

Two servers with the demo's model, one with `--prepare-turns on` and one without it, get the same chats by
turns: in each round some clients at once, none of which ever pauses. Who goes first changes with each round.
Told are times to the first byte and to the end of an answer, and the ratio of both servers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field
from itertools import islice

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from stemma.cli.server_process import ServerProcess

WAYS = ("off", "on")
_PAUSE_S = 2.0
"""Between two servers' turns, so that what one prepares is over when the other begins."""
_SUBJECTS = ("a lighthouse", "bread", "the sea", "trains", "a garden", "winter", "maps", "a violin")


@dataclass(slots=True)
class Times:
    """Seconds of all requests of one server."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)


async def converse(client: httpx.AsyncClient, name: str, num_turns: int, times: Times) -> None:
    """Chat without pauses; note how long each answer took."""
    messages: list[dict[str, str]] = []
    for turn in range(num_turns):
        subject = _SUBJECTS[turn % len(_SUBJECTS)]
        messages.append({"role": "user", "content": f"{name}, question {turn}: tell me about {subject}."})
        body = {"messages": messages, "max_tokens": 32, "temperature": 0, "stream": True}
        begun, is_first = time.perf_counter(), True
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_bytes():
                if is_first:
                    times.first_s.append(time.perf_counter() - begun)
                    is_first = False
        times.whole_s.append(time.perf_counter() - begun)
        messages.append({"role": "assistant", "content": f"I don't know much about {subject}."})


async def load(url: str, round_name: str, num_clients: int, num_turns: int, times: Times) -> None:
    """One round of one server."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        names = [f"{round_name}, client {number}" for number in range(num_clients)]
        await asyncio.gather(*(converse(client, name, num_turns, times) for name in names))


def table_of(found: dict[str, Times]) -> Table:
    """Return medians and 99th percentiles of both servers, and their ratios."""
    table = Table(
        "", "requests", *(f"{of} {part}" for of in ("first byte", "answer") for part in ("p50", "p99"))
    )
    rows = {}
    for way, times in found.items():
        quantiles = [np.quantile(values, (0.5, 0.99)) for values in (times.first_s, times.whole_s)]
        rows[way] = np.concatenate(quantiles)
        cells = [f"{1000 * seconds:.1f} ms" for seconds in rows[way].tolist()]
        table.add_row(f"preparing {way}", str(len(times.whole_s)), *cells)
    table.add_row("on / off", "", *(f"{ratio:.3f}" for ratio in (rows["on"] / rows["off"]).tolist()))
    return table


def main() -> int:
    """Serve twice, load in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--model", default="demo")
    given = parser.parse_args()
    found = {way: Times() for way in WAYS}
    with (
        ServerProcess(given.model, ["--prepare-turns", "off"]) as without,
        ServerProcess(given.model, ["--prepare-turns", "on"]) as preparing,
    ):
        urls = {"off": without.url, "on": preparing.url}
        for way in WAYS:  # the first round of each warms up
            asyncio.run(load(urls[way], "Warm", given.clients, 2, Times()))
        for number in range(given.rounds):
            for way in islice((*WAYS, *WAYS), number % 2, number % 2 + 2):
                time.sleep(_PAUSE_S)
                asyncio.run(load(urls[way], f"Round {number}", given.clients, given.turns, found[way]))
    Console().print(table_of(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
