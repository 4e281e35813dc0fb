"""What preparing turns in idle time costs a busy server: `python -m benchmarks.preparation [--rounds N]`.

Three servers with the demo's model, one with `--prepare-turns on` and two without it, get the same chats by
turns: in each round some clients at once, none of which ever pauses. Who goes first changes with each round.
Told are times to the first byte and to the end of an answer, processor time of the server for each answer,
and the ratio to the first server without, by rounds: the second one, which differs in nothing, shows what
chance does. Drafts are off and answers have one length: with them an answer's time hangs on who was answered
just before it, and a few milliseconds at a round's beginning change all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from stemma.cli.server_process import ServerProcess

WAYS = {"off": "off", "off, again": "off", "on": "on"}
"""Name in the table -> `--prepare-turns`."""
_PAUSE_S = 3.0
"""Between two servers' turns, so that what one prepares is over when the other begins."""
_SUBJECTS = ("a lighthouse", "bread", "the sea", "trains", "a garden", "winter", "maps", "a violin")
_NUM_DRAWS = 2000


@dataclass(slots=True)
class Times:
    """Seconds of all requests of one round of one server."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


async def converse(client: httpx.AsyncClient, name: str, num_turns: int, times: Times) -> None:
    """Chat without pauses; note how long each answer took."""
    messages: list[dict[str, str]] = []
    for turn in range(num_turns):
        subject = _SUBJECTS[turn % len(_SUBJECTS)]
        messages.append({"role": "user", "content": f"{name}, question {turn}: tell me about {subject}."})
        body = {"messages": messages, "max_tokens": 32, "temperature": 0, "stream": True, "ignore_eos": True}
        begun, is_first = time.perf_counter(), True
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_bytes():
                if is_first:
                    times.first_s.append(time.perf_counter() - begun)
                    is_first = False
        times.whole_s.append(time.perf_counter() - begun)
        messages.append({"role": "assistant", "content": f"I don't know much about {subject}."})


async def load(server: ServerProcess, round_name: str, num_clients: int, num_turns: int) -> Times:
    """One round of one server."""
    times, before_s = Times(), _cpu_s(server.pid)
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        names = [f"{round_name}, client {number}" for number in range(num_clients)]
        await asyncio.gather(*(converse(client, name, num_turns, times) for name in names))
    times.cpu_s = _cpu_s(server.pid) - before_s
    return times


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measures(times: Times) -> list[float]:
    """Return milliseconds: first byte, answer, each as median and 99th percentile; processor per answer."""
    found = [np.quantile(values, q) for values in (times.first_s, times.whole_s) for q in (0.5, 0.99)]
    return [1000 * float(value) for value in (*found, times.cpu_s / len(times.whole_s))]


def table_of(found: dict[str, list[Times]]) -> Table:
    """Return the medians over rounds, and the ratios to the first way with 95 % of draws of rounds."""
    heads = ("first byte p50", "first byte p99", "answer p50", "answer p99", "processor per answer")
    table = Table("", "answers", *heads)
    rows = {way: np.array([measures(one) for one in rounds]) for way, rounds in found.items()}
    base = next(iter(rows.values()))
    draws = np.random.default_rng(0).integers(len(base), size=(_NUM_DRAWS, len(base)))
    for way, row in rows.items():
        count = str(sum(len(one.whole_s) for one in found[way]))
        table.add_row(f"preparing {way}", count, *(f"{value:.1f} ms" for value in np.median(row, axis=0)))
    for way, row in list(rows.items())[1:]:
        ratios = row / base
        low, high = np.quantile(np.median(ratios[draws], axis=1), (0.025, 0.975), axis=0)
        middle = np.median(ratios, axis=0)
        cells = [f"{m:.3f} ({a:.3f} to {b:.3f})" for m, a, b in zip(middle, low, high, strict=True)]
        table.add_row(f"{way} / off", "", *cells)
    return table


def turns_looked_at(url: str) -> str:
    """Return the counter of answers that idle time looked at, by outcome."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return " ".join(one.partition("{")[2] for one in lines if one.startswith("stemma_prepared_turns_total"))


def main() -> int:
    """Serve three times, load in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--model", default="demo")
    given = parser.parse_args()
    found: dict[str, list[Times]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        servers = {
            way: stack.enter_context(
                ServerProcess(given.model, ["--prepare-turns", flag, "--speculation", "off"])
            )
            for way, flag in WAYS.items()
        }
        for server in servers.values():  # the first round of each warms up
            asyncio.run(load(server, "Warm", given.clients, 2))
        num_disturbed = 0
        for number in range(given.rounds):
            order = list(WAYS)
            for way in order[number % len(order) :] + order[: number % len(order)]:
                time.sleep(_PAUSE_S)
                before = turns_looked_at(servers[way].url)
                found[way].append(
                    asyncio.run(load(servers[way], f"Round {number}", given.clients, given.turns))
                )
                num_disturbed += before != turns_looked_at(servers[way].url)
        looked = turns_looked_at(servers["on"].url)
    Console(width=180).print(table_of(found))
    print(f"looked at: {looked}; rounds in which that changed while clients were busy: {num_disturbed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
