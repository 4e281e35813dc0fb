"""The driver: sessions at a given concurrency or arrival rate, against one endpoint of one server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from stemma.cli.client import RequestFailed, StreamedAnswer, TokenCounter, stream_answer
from stemma_lab.measure.workloads import Session

Endpoint = Literal["chat", "completions"]
_PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How hard to drive the server."""

    concurrency: int | None = DEFAULT_CONCURRENCY
    """Sessions open at once; None: no limit."""
    request_rate: float | None = None
    """Sessions begun per second, Poisson; None: as fast as `concurrency` allows."""
    output_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and what it understands."""

    http: httpx.AsyncClient
    model: str
    endpoint: Endpoint
    extra: dict[str, Any]
    """Fields sent with every request."""
    count_tokens: TokenCounter | None = None


@dataclass(slots=True)
class Record:
    """The outcome of one request."""

    session: int
    turn: int
    answer: StreamedAnswer | None = None
    error: str | None = None


async def negotiate(
    http: httpx.AsyncClient, model: str, endpoint: Endpoint, count_tokens: TokenCounter | None = None
) -> Target:
    """Find out by one short request which extra fields the server takes; this also warms it up.

    Tries, in turn: usage in the stream and fixed-length greedy answers; without fixed length; nothing extra.
    Raises RequestFailed if none works.
    """
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    attempts: tuple[dict[str, Any], ...] = (
        {**usage, "temperature": 0.0, "ignore_eos": True},
        {**usage, "temperature": 0.0},
        {},
    )
    failure: RequestFailed | None = None
    for extra in attempts:
        target = Target(http, model, endpoint, extra, count_tokens)
        try:
            await ask(target, Session(("Hello",)), [], 2)
        except RequestFailed as error:
            if error.status not in (400, 422):
                raise
            failure = error
        else:
            return target
    assert failure is not None
    raise failure


async def ask(target: Target, session: Session, answers: Sequence[str], max_tokens: int) -> StreamedAnswer:
    """Send the turn of `session` that follows `answers`."""
    body = {"model": target.model, "max_tokens": max_tokens, **target.extra}
    if target.endpoint == "chat":
        body["messages"] = _messages(session, answers)
    else:
        body["prompt"] = _transcript(session, answers)
    return await stream_answer(target.http, _PATHS[target.endpoint], body, count_tokens=target.count_tokens)


def _messages(session: Session, answers: Sequence[str]) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": session.system}] if session.system else []
    for question, answer in zip(session.turns, answers, strict=False):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": session.turns[len(answers)]})
    return messages


def _transcript(session: Session, answers: Sequence[str]) -> str:
    """Return the prompt itself if there is only one turn, else the dialogue so far."""
    if len(session.turns) == 1 and not session.system:
        return session.turns[0]
    text = f"{session.system}\n\n" if session.system else ""
    for question, answer in zip(session.turns, answers, strict=False):
        text += f"User: {question}\nAssistant:{answer}\n"
    return text + f"User: {session.turns[len(answers)]}\nAssistant:"


async def drive(
    target: Target, sessions: Sequence[Session], options: LoadOptions, on_done: Callable[[Record], None]
) -> tuple[list[Record], float]:
    """Run all sessions; return their records in order of completion, and the wall-clock seconds.

    A session that fails ends there; the others go on.
    """
    records: list[Record] = []
    gate = asyncio.Semaphore(options.concurrency or len(sessions))
    arrivals = random.Random(options.seed)

    async def run(number: int, session: Session) -> None:
        answers: list[str] = []
        async with gate:
            for turn in range(len(session.turns)):
                record = Record(number, turn)
                try:
                    record.answer = await ask(target, session, answers, options.output_tokens)
                    answers.append(record.answer.text)
                except RequestFailed as error:
                    record.error = str(error)
                records.append(record)
                on_done(record)
                if record.error is not None:
                    return

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, session in enumerate(sessions):
            if options.request_rate is not None and number:
                await asyncio.sleep(arrivals.expovariate(options.request_rate))
            group.create_task(run(number, session))
    return records, time.perf_counter() - started
