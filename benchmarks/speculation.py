"""What drafts gain and cost: `python -m benchmarks.speculation [--json FILE] [--quick] [--threads N]`.

Decode speed with drafts over decode speed without, of one request, in one run, on the 0.5B shape in bf16:

* regenerate: an answer that an earlier session got for the same prompt;
* code edit: an answer that repeats a source file of its prompt with a name changed and lines added;
* unrelated: prose after a prompt of code, with nothing to copy from.

The output of a model with random weights is useless here, so its choice is replaced: the text is a script
(Python's own library and manual), and each row's logits get a bonus on the script's next token. Everything
else is real: the forward pass with its draft rows, the drafts, their verification and the sampler. A draft
is accepted exactly where it agrees with the script. (Lookahead guesses with the model itself, so here it only
shows its cost.) Two engines over the same weights take turns, the one with fewer tokens first, so that other
load on the machine affects both equally.

With `--real` a real model writes the text, see `benchmarks/real_text.py` for its options.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pydoc_data.topics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import real_text
from benchmarks.checkpoint import half_billion_checkpoint
from stemma.config.settings import EngineSettings, SpeculationSettings
from stemma.engine.api import GenerationRequest
from stemma.engine.cache_parts import make_index
from stemma.engine.core.engine import Engine
from stemma.engine.core.request import Limits
from stemma.engine.core.runner import Runner
from stemma.engine.core.step_rows import StepRows
from stemma.engine.drafts.drafter import make_drafter
from stemma.engine.drafts.source import num_accepted
from stemma.engine.llm import engine_settings
from stemma.engine.sampling.params import SamplingParams
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.device.kv import DeviceKV
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.text.tokenizer import Tokenizer
from stemma.prefix.keys import KeySpace
from stemma.types import TokenArray

NUM_BLOCKS = 256
GOALS = {"regenerate": 3.0, "code edit": 3.0, "unrelated": 0.98}


@dataclass(frozen=True)
class Workload:
    """A prompt and the answer that the script makes the model give."""

    name: str
    prompt: TokenArray
    answer: TokenArray
    num_before: int
    """Sessions with the same prompt and answer before the measured one."""


@dataclass(frozen=True)
class Result:
    """Decode speed of one workload."""

    name: str
    mode: str
    num_tokens: int
    tokens_per_s_off: float
    tokens_per_s_on: float
    ratio: float
    num_steps: int
    num_draft_tokens: int
    num_accepted: int
    goal: float


class ScriptedRunner(Runner):
    """A runner whose logits favour each request's script, by position of the row."""

    def __init__(self, model: CausalLM, kv: DeviceKV, *, max_batch_tokens: int) -> None:
        super().__init__(model, kv, max_batch_tokens=max_batch_tokens)
        self.scripts: dict[str, TokenArray] = {}

    def forward(self, rows: StepRows) -> torch.Tensor:
        """Return the model's logits, changed in favour of the scripts."""
        logits = super().forward(rows).clone()
        for item in rows.items:
            script = self.scripts[item.sequence.state.request.request_id]
            position = item.start + item.num_tokens - item.num_logits + 1
            expected = script[position : position + item.num_logits].tolist()
            # Behind a draft token that differs from the script the model is on its own.
            num_rows = min(num_accepted(item.draft, expected) + 1, len(expected)) if item.num_logits else 0
            logits[list(item.drawn_logits[:num_rows]), expected[:num_rows]] += 1e4
        return logits


class Player:
    """An engine, with or without drafts, that plays scripts and times its decode steps."""

    def __init__(self, model: CausalLM, settings: EngineSettings, speculation: SpeculationSettings) -> None:
        layout = model.layout(settings.cache.block_size)
        kv = DeviceKV(layout, NUM_BLOCKS, model.device)
        key_space = KeySpace(model.fingerprint, layout.describe(), layout.block_size)
        cache = PrefixCache(kv, make_index(settings.cache, key_space), key_space)
        self.runner = ScriptedRunner(model, kv, max_batch_tokens=settings.scheduler.max_batch_tokens)
        self.engine = Engine(
            self.runner,
            cache,
            Limits((), model.max_model_len),
            settings.scheduler,
            vocab_size=model.vocab_size,
            drafter=make_drafter(speculation, cache.continuation),
        )
        self.num_left = 0
        self.decode_s = 0.0
        self.num_decoded = self.num_steps = 0
        self._num_sessions = 0

    def start(self, work: Workload) -> None:
        """Queue a session and run it up to its first token."""
        request_id = f"{work.name}-{self._num_sessions}"
        self._num_sessions += 1
        self.runner.scripts[request_id] = np.concatenate([work.prompt, work.answer])
        params = SamplingParams(temperature=0.0, max_tokens=len(work.answer), ignore_eos=True)
        self.engine.add(self.engine.checked(GenerationRequest(request_id, work.prompt, params)))
        self.num_left = len(work.answer)
        self.decode_s, self.num_decoded, self.num_steps = 0.0, 0, 0
        while self.num_left == len(work.answer):
            self.num_left -= self._run_step()

    def step(self) -> None:
        """Run one timed decode step."""
        start = perf_counter()
        num_tokens = self._run_step()
        self.decode_s += perf_counter() - start
        self.num_left -= num_tokens
        self.num_decoded += num_tokens
        self.num_steps += 1

    def _run_step(self) -> int:
        """Return how many tokens a step gave."""
        num_tokens = 0
        for news in self.engine.step():
            if news.error is not None:
                raise RuntimeError(news.error)
            num_tokens += len(news.token_ids)
        return num_tokens


def workloads(tokenizer: Tokenizer, scale: float) -> list[Workload]:
    """Return a warm-up and the three texts; `scale` shortens them."""

    def tokens(text: str, first: int, length: float) -> TokenArray:
        token_ids = tokenizer.encode(text)[first : first + int(length * scale)]
        assert len(token_ids) == int(length * scale), "the text is too short"
        return token_ids

    source = inspect.getsource(textwrap)
    edited = source.replace("width", "columns").replace(
        "        return ", "        # The result is new.\n        return "
    )
    manual = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    file_tokens = tokens(source, 0, 1200)
    return [
        Workload("warm-up", tokens(manual, 0, 200), tokens(manual, 2000, 128), 0),
        Workload("unrelated", file_tokens, tokens(manual, 4000, 512), 0),
        Workload("regenerate", tokens(manual, 9000, 600), tokens(manual, 12_000, 512), 1),
        Workload("code edit", file_tokens, tokens(edited, 0, 1000), 0),
    ]


def play(model: CausalLM, settings: EngineSettings, work: Workload, warm_up: Workload, mode: str) -> Result:
    """Serve one workload on two fresh engines in turns; each has served another text before.

    Earlier sessions matter only to the engine with drafts: decode speed is what is compared.
    """
    options = settings.speculation.model_dump() | {"mode": mode}
    off = Player(model, settings, SpeculationSettings(mode="off"))
    on = Player(model, settings, SpeculationSettings(**options))
    for player in (off, on):
        for earlier in [warm_up] + [work] * (work.num_before if player is on else 0):
            player.start(earlier)
            while player.num_left:
                player.step()
    before = on.engine.stats()
    for player in (off, on):
        player.start(work)
    while off.num_left or on.num_left:
        (off if off.num_left >= on.num_left else on).step()
    after = on.engine.stats()
    speed_off, speed_on = off.num_decoded / off.decode_s, on.num_decoded / on.decode_s
    return Result(
        name=work.name,
        mode=mode,
        num_tokens=on.num_decoded,
        tokens_per_s_off=speed_off,
        tokens_per_s_on=speed_on,
        ratio=speed_on / speed_off,
        num_steps=on.num_steps,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted=after.num_accepted_draft_tokens - before.num_accepted_draft_tokens,
        goal=GOALS[work.name],
    )


def show(results: Sequence[Result]) -> None:
    table = Table(title="Decode, tokens a second, batch 1")
    for column in (
        "text",
        "drafts",
        "tokens",
        "without",
        "with",
        "ratio",
        "goal",
        "steps",
        "drafted",
        "held",
    ):
        table.add_column(column, justify="left" if column in ("text", "drafts") else "right")
    for r in results:
        table.add_row(
            r.name,
            r.mode,
            str(r.num_tokens),
            f"{r.tokens_per_s_off:.1f}",
            f"{r.tokens_per_s_on:.1f}",
            f"{r.ratio:.3f}",
            f">= {r.goal}",
            str(r.num_steps),
            str(r.num_draft_tokens),
            str(r.num_accepted),
        )
    Console(width=110).print(table)


def main() -> None:
    if "--real" in sys.argv:
        real_text.main([one for one in sys.argv[1:] if one != "--real"])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="shorter texts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--modes", nargs="+", default=["auto"], help="any of auto, prompt_lookup, tree, la")
    parser.add_argument("--texts", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--model", type=Path, help="another checkpoint with a byte-level tokenizer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = options.model or half_billion_checkpoint()
    settings = engine_settings(path, num_threads=options.threads)
    model = load_model(settings.model)
    warm_up, *texts = workloads(Tokenizer(path), 0.3 if options.quick else 1.0)
    results: list[Result] = []
    for mode in options.modes:
        for work in (text for text in texts if text.name in options.texts):
            results.append(play(model, settings, work, warm_up, mode))
            show(results[-1:])
    show(results)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
