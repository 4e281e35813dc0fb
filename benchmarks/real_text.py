"""What drafts gain on text that a real model writes: `python -m benchmarks.speculation --real`.

Sessions of six kinds, decoded greedily (but for the last) by the demo's model (SmolLM2-135M-Instruct) or
another checkpoint:

* chat: conversations of several turns, each over the answers before it;
* code-edit: a source file and a change to make in it;
* regenerate: a question that was answered before, again greedily, and once sampled;
* quote: a text, and the request to repeat parts of it in a summary;
* questions: few-shot arithmetic (needs `--data`);
* unrelated: stories and summaries, sampled at temperature 1, where next to nothing is copied from the prompt.

`--data DIR` is a folder with `gsm8k_test.jsonl` and `sonnet.txt`; without it, small texts from here and from
Python's own library are used. One engine for each mode, all over the same weights; they take turns step by
step, the one with the fewest tokens first, so that other load on the machine affects all equally. Only steps
that decode are timed. The answers of all modes are compared: they must be the same tokens.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import cast

import torch
from rich.console import Console
from rich.table import Table

from stemma.config.settings import EngineSettings, SpeculationSettings
from stemma.engine.api import DraftCount, GenerationRequest
from stemma.engine.cache_parts import make_index
from stemma.engine.core.engine import Engine
from stemma.engine.core.prediction import ModelDrafts, PredictingRunner
from stemma.engine.core.request import Limits
from stemma.engine.core.runner import Runner
from stemma.engine.core.step_rows import StepRows
from stemma.engine.drafts.drafter import make_drafter
from stemma.engine.llm import engine_settings
from stemma.engine.preflight import with_checkpoint
from stemma.engine.sampling.params import SamplingParams
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.device.kv import DeviceKV
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.text.tokenizer import Tokenizer
from stemma.prefix.keys import KeySpace

NUM_BLOCKS = 1024
GOAL = 0.98
MODES = ("auto", "prompt_lookup", "tree", "la")
VERSE = """From fairest creatures we desire increase,
That thereby beauty's rose might never die,
But as the riper should by time decease,
His tender heir might bear his memory:
But thou, contracted to thine own bright eyes,
Feed'st thy light's flame with self-substantial fuel,
Making a famine where abundance lies,
Thyself thy foe, to thy sweet self too cruel."""


@dataclass(frozen=True)
class Session:
    """What a user says, turn by turn."""

    turns: tuple[str, ...]
    max_tokens: int = 160
    temperature: float = 0.0


def sessions(data: Path | None) -> dict[str, list[Session]]:
    """Return the sessions of each kind."""
    code = [inspect.getsource(one) for one in (shlex.join, shlex.split, textwrap.shorten, textwrap.dedent)]
    verse, questions = VERSE, list[dict[str, str]]()
    if data is not None:
        lines = (data / "sonnet.txt").read_text(encoding="utf-8").splitlines()
        verse = "\n".join(lines[:24])
        lines = (data / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
        questions = [json.loads(line) for line in lines[:9]]
    chat = [
        Session(
            (
                "What is a prefix tree, and what is it good for?",
                "Give an example in Python.",
                "Explain each line of it.",
                "Now say all of that in three sentences.",
            )
        ),
        Session(
            (
                "Write a short letter to the city about the lights in the park.",
                "Make it more polite.",
                "Add a sentence about the benches, and keep the rest as it is.",
            )
        ),
    ]
    asked = "Why is the sky blue, and why are sunsets red?"
    return {
        "chat": chat,
        "code-edit": [
            Session((f"Add a comment to each line of this code and repeat it:\n\n```python\n{one}```",), 256)
            for one in code
        ],
        "regenerate": [
            *(Session((asked,), 200) for _ in range(3)),
            Session((asked,), 200, temperature=0.7),
        ],
        "quote": [
            Session((f"{verse}\n\nQuote the first four lines of this text, then say what they mean.",), 200),
            Session((f"{verse}\n\nRepeat this text and explain its last line.",), 256),
        ],
        "questions": _few_shot(questions),
        "unrelated": [
            Session((task,), 200, temperature=1.0)
            for task in (
                "Tell a story about a lighthouse keeper who finds a letter.",
                "Describe a market in a harbour town early in the morning.",
                f"{verse}\n\nSay in your own words what this is about, without quoting it.",
            )
        ],
    }


def _few_shot(questions: list[dict[str, str]]) -> list[Session]:
    shots = "\n\n".join(f"Question: {one['question']}\nAnswer: {one['answer']}" for one in questions[:4])
    return [Session((f"{shots}\n\nQuestion: {one['question']}\nAnswer:",)) for one in questions[4:]]


@dataclass
class Result:
    """Decode speed of one kind of session in one mode."""

    kind: str
    mode: str
    num_tokens: int = 0
    num_steps: int = 0
    decode_s: float = 0.0
    drafts: dict[str, DraftCount] = field(default_factory=dict)
    ratio: float = 1.0
    """Tokens a second, over those without drafts."""


class WatchedRunner:
    """Notes whether a step computed prompts."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.had_prompt = False

    def forward(self, rows: StepRows) -> torch.Tensor:
        """See `Runner.forward`."""
        self.had_prompt = not rows.is_decode
        return self._runner.forward(rows)


class Player:
    """An engine in one mode that plays sessions, one turn of each at a time."""

    def __init__(
        self, model: CausalLM, tokenizer: Tokenizer, settings: EngineSettings, mode: str, kind: str
    ) -> None:
        options = settings.speculation.model_dump() | {"mode": mode}
        speculation = SpeculationSettings(**options)
        layout = model.layout(settings.cache.block_size)
        kv = DeviceKV(layout, NUM_BLOCKS, model.device)
        key_space = KeySpace(model.fingerprint, layout.describe(), layout.block_size)
        cache = PrefixCache(kv, make_index(settings.cache, key_space), key_space)
        drafter = make_drafter(speculation, cache.continuation)
        max_batch_tokens = settings.scheduler.max_batch_tokens
        runner = Runner(model, kv, max_batch_tokens=max_batch_tokens)
        model_drafts = None
        if mode == "mtp":
            assert drafter is not None
            runner = predicting = PredictingRunner(model, kv, max_batch_tokens=max_batch_tokens)
            model_drafts = ModelDrafts(predicting, drafter, cache)
        self._watched = WatchedRunner(runner)
        self.engine = Engine(
            cast(Runner, self._watched),
            cache,
            Limits(model.eos_token_ids, model.max_model_len),
            settings.scheduler,
            vocab_size=model.vocab_size,
            drafter=drafter,
            model_drafts=model_drafts,
        )
        self._tokenizer = tokenizer
        self._open: dict[str, list[int]] = {}
        self.result = Result(kind, mode)
        self.answers: list[list[int]] = []

    def play(self, waiting: Sequence[Session], concurrency: int) -> Iterator[None]:
        """Play all sessions, `concurrency` at a time; yields after each step."""
        left = list(enumerate(waiting))
        running: dict[str, tuple[Session, int, list[dict[str, str]]]] = {}
        while left or running:
            while left and len(running) < concurrency:
                number, session = left.pop(0)
                self._ask(f"{number}-0", session, 0, [], running)
            self._step()
            yield
            for name in [name for name in running if name not in self._open]:
                session, turn, messages = running.pop(name)
                answer = self._tokenizer.decode(self.answers[-1])
                messages.append({"role": "assistant", "content": answer})
                if turn + 1 < len(session.turns):
                    self._ask(f"{name}-{turn + 1}", session, turn + 1, messages, running)
        self.result.drafts = self.engine.stats().drafts_by_source

    def _ask(
        self,
        name: str,
        session: Session,
        turn: int,
        messages: list[dict[str, str]],
        running: dict[str, tuple[Session, int, list[dict[str, str]]]],
    ) -> None:
        messages.append({"role": "user", "content": session.turns[turn]})
        prompt = self._tokenizer.apply_chat_template(messages)
        params = SamplingParams(
            max_tokens=session.max_tokens, temperature=session.temperature, seed=1, min_tokens=8
        )
        self.engine.add(self.engine.checked(GenerationRequest(name, prompt, params)))
        self._open[name] = []
        running[name] = session, turn, messages

    def _step(self) -> None:
        start_s = perf_counter()
        news = self.engine.step()
        seconds = perf_counter() - start_s
        num_tokens = 0
        for one in news:
            if one.error is not None:
                raise RuntimeError(one.error)
            name = one.state.request.request_id
            self._open[name] += one.token_ids
            num_tokens += len(one.token_ids)
            if one.finish_reason is not None:
                self.answers.append(self._open.pop(name))
        if not self._watched.had_prompt:
            self.result.num_tokens += num_tokens
            self.result.num_steps += 1
            self.result.decode_s += seconds


def compare(
    players: Sequence[Player], waiting: Sequence[Session], concurrency: int, warm_up: Sequence[Session]
) -> list[Result]:
    """Let all players play the same sessions in turns; the first one is without drafts."""
    for player in players:
        for _ in player.play(warm_up, 1):
            pass
        player.answers.clear()
        player.result = Result(player.result.kind, player.result.mode)
    before = {player.result.mode: player.engine.stats().drafts_by_source for player in players}
    games = {id(player): player.play(waiting, concurrency) for player in players}
    active = list(players)
    while active:
        player = min(active, key=lambda one: one.result.num_tokens)
        if next(games[id(player)], StopIteration) is StopIteration:
            active.remove(player)
    plain = players[0]
    speed = plain.result.num_tokens / plain.result.decode_s
    for player in players:
        if sorted(player.answers) != sorted(plain.answers):
            raise RuntimeError(f"{player.result.mode}: other answers than without drafts")
        result, known = player.result, before[player.result.mode]
        result.ratio = result.num_tokens / result.decode_s / speed
        for source, count in known.items():
            result.drafts[source] = result.drafts[source].plus(-count.num_proposed, -count.num_accepted)
    return [player.result for player in players]


def show(results: Sequence[Result]) -> None:
    table = Table(title="Decode of real text: tokens a second, and the share of draft tokens that held")
    for column in ("kind", "mode", "tokens", "steps", "tokens/s", "ratio", "held of drafted, by source"):
        table.add_column(column, justify="left" if column in ("kind", "mode") else "right")
    for one in results:
        drafts = ", ".join(
            f"{source} {count.num_accepted}/{count.num_proposed}"
            for source, count in sorted(one.drafts.items())
            if count.num_proposed
        )
        mark = "" if one.ratio >= GOAL else " !"
        table.add_row(
            one.kind,
            one.mode,
            str(one.num_tokens),
            str(one.num_steps),
            f"{one.num_tokens / one.decode_s:.1f}",
            f"{one.ratio:.3f}{mark}",
            drafts,
        )
    Console(width=120).print(table)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "benchmarks.speculation --real",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=Path("demo"), help="demo, or a checkpoint")
    parser.add_argument("--data", type=Path, help="folder with gsm8k_test.jsonl and sonnet.txt")
    parser.add_argument("--only", help="comma list of kinds; default: all")
    parser.add_argument("--modes", default=",".join(MODES), help="comma list; mtp where the model has it")
    parser.add_argument("--concurrency", type=int, default=1, help="sessions at a time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    settings = with_checkpoint(engine_settings(options.model, num_threads=options.threads))
    tokenizer = Tokenizer(settings.model.path)
    modes = ["off", *options.modes.split(",")]
    models = {
        predicts: load_model(settings.model, predicts=predicts) for predicts in {m == "mtp" for m in modes}
    }
    results: list[Result] = []
    for kind, waiting in sessions(options.data).items():
        if not waiting or (options.only and kind not in options.only.split(",")):
            continue
        players = [Player(models[mode == "mtp"], tokenizer, settings, mode, kind) for mode in modes]
        warm_up = [Session(("Name three colours.",), 24)]
        results += compare(players, waiting, options.concurrency, warm_up)
        show(results[-len(players) :])
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
