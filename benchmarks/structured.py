"""What structured output costs in decode: `python -m benchmarks.structured`.

Random weights of Qwen2.5-0.5B's shape in bf16, the worst case: nearly every token needs a mask. With
`--real` the demo's model, which is asked for what the schema says and mostly follows it by itself. In each
round a batch that follows a JSON schema and a free one, in either order in turn, decode the same number of
steps behind fresh prompts. The result is the median over the rounds of the ratio of the two batches' median
steps: the machine's speed changes from minute to minute, less within a round. Drafts are off; with `--drafts`
they are as `stemma serve` has them (tokens that a grammar forces are drafts too), and times per token are
compared. Options: `--batch N`, `--rounds N`, `--threads N`, `--json FILE`. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.checkpoint import VOCAB_SIZE, half_billion_checkpoint
from stemma.engine.api import GenerationRequest
from stemma.engine.build import build_engine
from stemma.engine.core.engine import Engine
from stemma.engine.llm import engine_settings
from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.params import SamplingParams
from stemma.model.load.demo import demo_model

GOAL_PERCENT = 3.0
NUM_TOKENS = 48
NUM_PROMPT_TOKENS = 64
ASKED = (
    "<|im_start|>user\nList {number} items of shop {topic} as a JSON array of objects with name (string), "
    "size (integer) and tags (array of new, old or open).<|im_end|>\n<|im_start|>assistant\n"
)
SCHEMA = json.dumps(
    {
        "type": "array",
        "minItems": 500,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "size": {"type": "integer"},
                "tags": {"type": "array", "items": {"enum": ["new", "old", "open"]}},
            },
            "required": ["name", "size", "tags"],
            "additionalProperties": False,
        },
    }
)


@dataclass(slots=True)
class Decode:
    """Steps of pure decode of a whole batch."""

    times_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def step_ms(self) -> float:
        """Median time of a step."""
        return statistics.median(self.times_ms)

    def token_ms(self, batch: int) -> float:
        """Time in which each sequence of the batch gets a token."""
        return batch * sum(self.times_ms) / self.num_tokens


def decode(engine: Engine, prompts: Sequence[np.ndarray], grammar: GrammarSpec | None) -> Decode:
    """Serve the prompts together; return the steps of pure decode."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, grammar=grammar)
    for number, prompt in enumerate(prompts):
        engine.add(engine.checked(GenerationRequest(f"r{time.monotonic_ns()}-{number}", prompt, params)))
    found, has_begun = Decode(), False
    while engine.has_work:
        start = time.perf_counter()
        news = engine.step()
        took = 1e3 * (time.perf_counter() - start)
        if len(news) == len(prompts) and not any(item.finish_reason for item in news):
            if has_begun:  # the first one draws the tokens of the prompts
                found.times_ms.append(took)
                found.num_tokens += sum(len(item.token_ids) for item in news)
            has_begun = True
    return found


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    speculation = "auto" if options.drafts else "off"
    settings = {"kv_cache_memory": "400MB", "speculation": speculation, "num_threads": options.threads}
    settings = {name: value for name, value in settings.items() if value is not None}
    checkpoint = demo_model().path if options.real else half_billion_checkpoint()
    parts = build_engine(engine_settings(checkpoint, **settings))
    engine, rng = parts.engine, np.random.default_rng(0)
    spec = GrammarSpec("json_schema", SCHEMA)
    rounds: list[tuple[float, float]] = []
    for number in range(options.rounds + 1):
        found = {}
        for grammar in (None, spec) if number % 2 else (spec, None):
            prompts = [
                parts.tokenizer.encode(ASKED.format(number=int(rng.integers(3, 1000)), topic=topic))
                if options.real
                else rng.integers(3, VOCAB_SIZE - 64, NUM_PROMPT_TOKENS).astype(np.int32)
                for topic in range(options.batch)
            ]
            steps = decode(engine, prompts, grammar)
            found[grammar] = steps.token_ms(options.batch) if options.drafts else steps.step_ms()
        if number:  # the first round warms up
            rounds.append((found[None], found[spec]))
    plain, ours = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratios = sorted(ours / plain for plain, ours in rounds)
    percent = 100 * (statistics.median(ratios) - 1)
    quarter = len(ratios) // 4
    print(
        f"decode, batch {options.batch}: free {plain:.2f} ms a {'token' if options.drafts else 'step'}, JSON "
        f"schema {ours:.2f} ms, {percent:+.2f} % (goal: at most {GOAL_PERCENT} %; half of the {len(ratios)} "
        f"rounds between {100 * (ratios[quarter] - 1):+.2f} and {100 * (ratios[-1 - quarter] - 1):+.2f} %)"
    )
    if options.json is not None:
        figures = {"batch": options.batch, "free_ms": plain, "structured_ms": ours, "percent": percent}
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
