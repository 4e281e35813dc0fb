"""What `benchmarks.versus` measures: each probe drives one server with the client of `stemma bench`.

Prompts come from seeds, so every server gets the same text. Answers of a random model are noise that differs
from server to server; where a dialogue goes on, a fixed answer takes their place in the history.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from stemma.cli.client import RequestFailed, StreamedAnswer
from stemma.cli.random_text import TextMaker
from stemma_lab.measure.driver import Target, ask
from stemma_lab.measure.workloads import Session, WorkloadOptions, few_shot

Counter = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One figure of one server."""

    value: float
    cached_share: float | None
    """Share of prompt tokens that the server says it served from cache; None: it doesn't say."""
    samples: list[float]


@dataclass(frozen=True, slots=True)
class Probe:
    """A workload and the figure taken from it."""

    name: str
    title: str
    unit: str
    run: Callable[[Target, Path | None, Counter], Awaitable[ProbeResult]]
    needs_data: bool = False
    num_tokens: int = 4096
    """Longest prompt and answer together. What is longer than servers take by default runs if named."""


def _result(value: float, answers: Sequence[StreamedAnswer], samples: Sequence[float] = ()) -> ProbeResult:
    share = None
    if answers and all(a.num_cached_tokens is not None and a.num_prompt_tokens for a in answers):
        cached = sum(a.num_cached_tokens or 0 for a in answers)
        share = round(cached / sum(a.num_prompt_tokens or 0 for a in answers), 3)
    return ProbeResult(value, share, list(samples))


def _maker(count: Counter, seed: int) -> TextMaker:
    return TextMaker(random.Random(seed), count)


async def _one(target: Target, prompt: str, max_tokens: int) -> StreamedAnswer:
    return await ask(target, Session((prompt,)), [], max_tokens)


async def _whole(target: Target, prompt: str, max_tokens: int, **fields: object) -> StreamedAnswer:
    """Ask for an answer that isn't streamed: vLLM streams no beam search."""
    extra = {name: value for name, value in target.extra.items() if name != "stream_options"}
    body = {"model": target.model, "prompt": prompt, "max_tokens": max_tokens, **extra, **fields}
    answer = StreamedAnswer(time.perf_counter())
    try:
        response = await target.http.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    if response.status_code != 200:
        raise RequestFailed(f"HTTP {response.status_code}: {response.text[:300]}", response.status_code)
    answer.finished_at = time.perf_counter()
    content = response.json()
    if len(content["choices"]) != fields.get("n", 1):
        raise RequestFailed(f"{len(content['choices'])} answers instead of {fields.get('n', 1)}")
    usage = content["usage"]
    answer.num_prompt_tokens = usage["prompt_tokens"]
    answer.num_generated_tokens = usage["completion_tokens"]
    answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return answer


async def _together(
    target: Target, prompts: Sequence[str], max_tokens: int, limit: int
) -> list[StreamedAnswer]:
    gate = asyncio.Semaphore(limit)

    async def run(prompt: str) -> StreamedAnswer:
        async with gate:
            return await _one(target, prompt, max_tokens)

    return list(await asyncio.gather(*(run(prompt) for prompt in prompts)))


def _ttft_probe(
    name: str, title: str, prompts: Callable[[TextMaker, int], tuple[list[str], str]], num_samples: int
) -> Probe:
    """TTFT of a prompt after others were sent; `prompts(maker, i)` gives (to send before, to measure)."""

    async def run(target: Target, _: Path | None, count: Counter) -> ProbeResult:
        answers = []
        for i in range(num_samples):
            before, measured = prompts(_maker(count, 1000 * len(name) + i), i)
            for prompt in before:
                await _one(target, prompt, 2)
            answers.append(await _one(target, measured, 2))
        samples = [1000 * a.ttft_s for a in answers]
        return _result(statistics.median(samples), answers, samples)

    return Probe(name, title, "ms", run)


def _warm(maker: TextMaker, _: int) -> tuple[list[str], str]:
    base = maker.text(2048)
    return [base], f"{base} {maker.text(32)}"


def _repeat(maker: TextMaker, _: int) -> tuple[list[str], str]:
    base = maker.text(2048)
    return [base], base


def decode_rate(answers: Sequence[StreamedAnswer]) -> float | None:
    """Return the tokens a second that came after every answer had its first; None if none came.

    The first piece counts as one token, and all others as equally many: servers join tokens.
    """
    first = max(a.first_token_at or a.finished_at for a in answers)
    tokens, last = 0.0, max(a.finished_at for a in answers)
    for a in answers:
        late = sum(1 for t in a.piece_times if t > first)
        tokens += late * (a.num_generated_tokens - 1) / max(1, len(a.piece_times) - 1)
    return tokens / (last - first) if last > first else None


def _decode_probe(name: str, batch: int, context: int, num_tokens: int, num_samples: int) -> Probe:
    async def run(target: Target, _: Path | None, count: Counter) -> ProbeResult:
        samples, answers = [], []
        for i in range(num_samples):
            maker = _maker(count, 77_000 + 100 * i + batch + context)
            prompts = [maker.text(context) for _ in range(batch)]
            # Computed before: how a server mixes prompts with decodes would decide which tokens count.
            await _together(target, prompts, 1, batch)
            done = await _together(target, prompts, num_tokens, batch)
            if (rate := decode_rate(done)) is not None:
                samples.append(rate)
            answers += done
        return _result(statistics.median(samples), answers, samples)

    return Probe(name, f"decode, batch {batch}, context {context}", "tok/s", run)


def _total_probe(
    name: str,
    title: str,
    prompts: Callable[[Path | None, Counter], list[str]],
    *,
    max_tokens: int,
    limit: int = 8,
    needs_data: bool = False,
    mean_ttft: bool = False,
) -> Probe:
    """Total time of a list of prompts, `limit` at once, or the mean TTFT one by one."""

    async def run(target: Target, data: Path | None, count: Counter) -> ProbeResult:
        texts = prompts(data, count)
        began = time.perf_counter()
        answers = await _together(target, texts, max_tokens, 1 if mean_ttft else limit)
        wall_s = time.perf_counter() - began
        if mean_ttft:
            samples = [1000 * a.ttft_s for a in answers]
            return _result(statistics.fmean(samples), answers, samples)
        return _result(wall_s, answers)

    return Probe(name, title, "ms" if mean_ttft else "s", run, needs_data)


async def _multi_turn(target: Target, _: Path | None, count: Counter) -> ProbeResult:
    """8 chats of 6 turns at once; one system prompt of 256 tokens; 64 tokens a question and an answer."""
    maker = _maker(count, 4242)
    system = maker.text(256)
    sessions = [Session(tuple(maker.text(64) for _ in range(6)), system) for _ in range(8)]
    history = [[maker.text(48) for _ in range(6)] for _ in range(8)]

    async def chat(session: Session, fixed: list[str]) -> list[StreamedAnswer]:
        return [await ask(target, session, fixed[:turn], 48) for turn in range(len(session.turns))]

    began = time.perf_counter()
    chats = await asyncio.gather(*(chat(s, fixed) for s, fixed in zip(sessions, history, strict=True)))
    return _result(time.perf_counter() - began, [answer for answers in chats for answer in answers])


async def _parallel_samples(target: Target, _: Path | None, count: Counter) -> ProbeResult:
    """Eight samples of one 1,024-token prompt by `n`, three prompts in turn."""
    maker = _maker(count, 888)
    extra = {**target.extra, "n": 8, "temperature": 1.0}
    many = Target(target.http, target.model, target.endpoint, extra, target.count_tokens)
    began = time.perf_counter()
    answers = [await _one(many, maker.text(1024), 24) for _ in range(3)]
    return _result(time.perf_counter() - began, answers)


async def _beam(target: Target, _: Path | None, count: Counter) -> ProbeResult:
    """Beam search of width 4 over a 1,024-token prompt, three prompts in turn."""
    maker = _maker(count, 999)
    began = time.perf_counter()
    answers = [await _whole(target, maker.text(1024), 24, n=4, use_beam_search=True) for _ in range(3)]
    return _result(time.perf_counter() - began, answers)


def _gsm8k(data: Path | None, count: Counter) -> list[str]:
    assert data is not None
    options = WorkloadOptions(num_requests=24, num_shots=8, data=data / "gsm8k_test.jsonl")
    return [s.turns[0] for s in few_shot(options, _maker(count, 1), random.Random(1))]


def _mmlu(data: Path | None, count: Counter) -> list[str]:
    assert data is not None
    options = WorkloadOptions(num_requests=32, num_shots=5, data=data / "mmlu")
    return [s.turns[0] for s in few_shot(options, _maker(count, 2), random.Random(2))]


def _no_sharing(_: Path | None, count: Counter) -> list[str]:
    maker = _maker(count, 31)
    return [maker.text(512) for _ in range(24)]


def _short_prefix(_: Path | None, count: Counter) -> list[str]:
    maker = _maker(count, 57)
    prefix = maker.text(100)
    return [f"{prefix} {maker.text(28)}" for _ in range(24)]


def _repeats(_: Path | None, count: Counter) -> list[str]:
    maker = _maker(count, 91)
    return [maker.text(768) for _ in range(6)] * 4


def _burst(_: Path | None, count: Counter) -> list[str]:
    """296 prompts, each one of 8 prefixes of 512 tokens and 64 of its own, in random order."""
    maker = _maker(count, 296)
    prefixes = [maker.text(512) for _ in range(8)]
    prompts = [f"{prefixes[i % 8]} {maker.text(64)}" for i in range(296)]
    random.Random(296).shuffle(prompts)
    return prompts


def all_probes(most_samples: int = 5) -> tuple[Probe, ...]:
    """Return all workloads; of first tokens and decode at most so many samples are taken each."""
    some, few = most_samples, min(3, most_samples)
    long = _ttft_probe("cold_7900", "TTFT, 7,900 tokens cold", lambda maker, _: ([], maker.text(7900)), few)
    return (
        _ttft_probe("cold", "TTFT, 2,048 tokens cold", lambda maker, _: ([], maker.text(2048)), some),
        _ttft_probe("warm", "TTFT, 2,048 cached + 32 new", _warm, some),
        _ttft_probe("repeat", "TTFT, exact repeat of 2,048", _repeat, some),
        _decode_probe("decode_1_64", 1, 64, 64, few),
        _decode_probe("decode_8_64", 8, 64, 64, few),
        _decode_probe("decode_1_2048", 1, 2048, 48, few),
        _decode_probe("decode_8_1024", 8, 1024, 48, few),
        Probe("multi_turn", "multi-turn chat, 8 sessions x 6 turns", "s", _multi_turn),
        _total_probe("gsm8k", "GSM8K 8-shot, 24 questions", _gsm8k, max_tokens=32, needs_data=True),
        _total_probe("mmlu", "MMLU 5-shot, 32 questions", _mmlu, max_tokens=2, needs_data=True),
        _total_probe(
            "prefix_100", "100-token shared prefix, mean TTFT", _short_prefix, max_tokens=2, mean_ttft=True
        ),
        _total_probe("repeats", "6 prompts of 768, each 4 times", _repeats, max_tokens=16),
        _total_probe("no_sharing", "no sharing, 24 x (512 + 32)", _no_sharing, max_tokens=32),
        Probe("n_8", "n = 8 samples of a 1,024-token prompt", "s", _parallel_samples),
        Probe("beam_4", "beam, width 4, 1,024-token prompt, 24 tokens", "s", _beam),
        _total_probe("burst", "296 prompts at once, 8 shared prefixes", _burst, max_tokens=32, limit=296),
        replace(long, num_tokens=8192),
    )
