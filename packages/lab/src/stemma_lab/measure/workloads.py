"""The workloads: a workload is a list of sessions, a session is one or more turns in order.

All randomness comes from one seed, so two servers get the same prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from stemma.cli.random_text import TextMaker
from stemma.errors import ConfigError
from stemma_lab.mmlu import examples_of, read_subject

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Session:
    """One user: what they say, turn by turn. Each turn waits for the answer to the one before."""

    turns: tuple[str, ...]
    system: str | None = None


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Sizes of a workload; each workload uses those that concern it."""

    num_requests: int = 32
    """Sessions of a single turn."""
    num_sessions: int = 8
    num_turns: int = 6
    input_tokens: int = 256
    """Tokens of a prompt's own part."""
    prefix_tokens: int = 512
    """Tokens of what prompts share."""
    num_prefixes: int = 1
    num_repeats: int = 4
    num_shots: int = 5
    data: Path | None = None
    seed: int = 0


WorkloadName = Literal["random", "shared-prefix", "multi-turn", "few-shot", "repeat", "sonnet"]
Builder = Callable[[WorkloadOptions, TextMaker, random.Random], list[Session]]


def random_prompts(options: WorkloadOptions, maker: TextMaker, _: random.Random) -> list[Session]:
    """Nothing shared: shows what a cache costs when it can't help."""
    return [Session((maker.text(options.input_tokens),)) for _ in range(options.num_requests)]


def shared_prefix(options: WorkloadOptions, maker: TextMaker, _: random.Random) -> list[Session]:
    """`num_prefixes` long beginnings, each shared by its part of the prompts."""
    prefixes = [maker.text(options.prefix_tokens) for _ in range(options.num_prefixes)]
    return [
        Session((f"{prefixes[number % len(prefixes)]}\n\n{maker.text(options.input_tokens)}",))
        for number in range(options.num_requests)
    ]


def multi_turn(options: WorkloadOptions, maker: TextMaker, _: random.Random) -> list[Session]:
    """Chats that grow: one system prompt for all, `num_turns` questions each."""
    system = maker.text(options.prefix_tokens) if options.prefix_tokens else None
    return [
        Session(tuple(maker.text(options.input_tokens) for _ in range(options.num_turns)), system)
        for _ in range(options.num_sessions)
    ]


def repeats(options: WorkloadOptions, maker: TextMaker, _: random.Random) -> list[Session]:
    """The same prompts `num_repeats` times over, all of them before any comes again."""
    num_different = max(1, options.num_requests // options.num_repeats)
    prompts = [Session((maker.text(options.input_tokens),)) for _ in range(num_different)]
    return prompts * options.num_repeats


def few_shot(options: WorkloadOptions, _: TextMaker, rng: random.Random) -> list[Session]:
    """Questions after the same worked examples: GSM8K (a .jsonl file) or MMLU (a directory of .csv)."""
    data = _need_data(options, "a GSM8K .jsonl file, or an MMLU directory with dev/ and test/")
    return _mmlu(data, options, rng) if data.is_dir() else _gsm8k(data, options, rng)


def sonnet(options: WorkloadOptions, maker: TextMaker, rng: random.Random) -> list[Session]:
    """Prompts of verse: the first lines are the same for all, the others are drawn at random."""
    data = _need_data(options, "a text file of verse")
    lines = [line.strip() for line in data.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{data} is empty")
    shared = _lines_of(iter(lines), options.prefix_tokens, maker)
    sessions = []
    for _ in range(options.num_requests):
        own = _lines_of((rng.choice(lines) for _ in iter(int, 1)), options.input_tokens, maker)
        sessions.append(Session(("Pick as many lines as you can from these:\n" + "\n".join(shared + own),)))
    return sessions


def _lines_of(source: Iterator[str], num_tokens: int, maker: TextMaker) -> list[str]:
    chosen: list[str] = []
    length = 0
    while length < num_tokens and (line := next(source, None)) is not None:
        chosen.append(line)
        length += maker.num_tokens(line)
    return chosen


def _need_data(options: WorkloadOptions, what: str) -> Path:
    if options.data is None:
        raise ConfigError(f"this workload needs --data: {what}")
    if not options.data.exists():
        raise ConfigError(f"--data {options.data} does not exist")
    return options.data


def _gsm8k(file: Path, options: WorkloadOptions, rng: random.Random) -> list[Session]:
    items: list[tuple[str, str]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            items.append((str(item["question"]), str(item["answer"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} line {number}: needs question and answer") from error
    if len(items) <= options.num_shots:
        raise ConfigError(f"{file} has {len(items)} questions, too few for {options.num_shots} shots")
    shots, questions = items[: options.num_shots], items[options.num_shots :]
    examples = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in shots)
    return [
        Session((f"{examples}Question: {question}\nAnswer:",))
        for question, _ in _draw(questions, options.num_requests, rng)
    ]


def _mmlu(directory: Path, options: WorkloadOptions, rng: random.Random) -> list[Session]:
    """Return prompts in the benchmark's own form, subjects mixed."""
    prompts: list[str] = []
    for test in sorted((directory / "test").glob("*_test.csv")):
        if examples_of(test).exists():
            prompts.extend(question.prompt for question in read_subject(test, options.num_shots))
    if not prompts:
        raise ConfigError(f"{directory} holds no test/*_test.csv with its dev/*_dev.csv")
    return [Session((prompt,)) for prompt in _draw(prompts, options.num_requests, rng)]


def _draw(items: Sequence[T], count: int, rng: random.Random) -> list[T]:
    """Return `count` different items, or all of them, cycled, if there are fewer."""
    shuffled = rng.sample(items, len(items))
    return [shuffled[number % len(shuffled)] for number in range(count)]


WORKLOADS: dict[WorkloadName, Builder] = {
    "random": random_prompts,
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "few-shot": few_shot,
    "repeat": repeats,
    "sonnet": sonnet,
}


def build(
    name: WorkloadName, options: WorkloadOptions, count_tokens: Callable[[str], int] | None
) -> list[Session]:
    """Return the sessions of workload `name`; raise ConfigError if its data is missing or malformed."""
    rng = random.Random(options.seed)
    return WORKLOADS[name](options, TextMaker(rng, count_tokens), rng)
