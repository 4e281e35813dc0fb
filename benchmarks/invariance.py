"""Answers of a real model with and without a cache: `python -m benchmarks.invariance [--prompts N]`.

Prompts are cut from text files (the project's documentation by default), several of them with the same
beginning. Each is answered alone, cold, with no cache; then all of them together from the device, in small
chunks, from host memory and disk after blocks have moved down, and with drafts. What is counted are answers
of which a token or a log-probability differs in any bit. On CPU with native kernels that is none.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stemma import LLM, SamplingParams
from stemma.model.demo import demo_model

TEXTS = tuple(sorted((Path(__file__).parent.parent / "docs").glob("*.md")))
PREFIX_TOKENS, OWN_TOKENS, NUM_SHARING = 400, 50, 5
"""A prompt: so many tokens that it shares with the others of its group, and so many of its own."""

NO_CACHE: dict[str, Any] = {"enable_prefix_cache": False, "max_num_seqs": 1, "speculation": "off"}
SMALL: dict[str, Any] = {"kv_cache_memory": "80MB", "load_when": "always"}
"""A device for some 3,400 tokens of the 135M model: what is asked for again has moved down."""


def prompts_of(llm: LLM, texts: Sequence[Path], first: int, num_prompts: int) -> list[list[int]]:
    """Cut prompts out of texts: each begins somewhere in one of them and ends somewhere else."""
    tokens: list[list[int]] = [
        llm.tokenizer.encode(path.read_text(encoding="utf-8")).tolist() for path in texts
    ]
    tokens = [one for one in tokens if len(one) > PREFIX_TOKENS + OWN_TOKENS]
    rng = random.Random(0)

    def piece(size: int) -> list[int]:
        text = rng.choice(tokens)
        start = rng.randrange(len(text) - size)
        return text[start : start + size]

    prompts: list[list[int]] = []
    while len(prompts) < first + num_prompts:
        prefix = piece(PREFIX_TOKENS)
        prompts += [prefix + piece(rng.randrange(1, OWN_TOKENS)) for _ in range(NUM_SHARING)]
    return prompts[first : first + num_prompts]


def answers(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> list[Any]:
    """Tokens and log-probabilities of greedy answers."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=1)
    found = llm.generate(list(prompts), params)
    return [(one.completions[0].token_ids, one.completions[0].logprobs) for one in found]


def count_differences(
    model: Path, num_prompts: int, *, first: int = 0, max_tokens: int = 12, texts: Sequence[Path] = TEXTS
) -> dict[str, int]:
    """Return, for each way to serve the prompts, how many of two rounds of answers differ."""
    llm = LLM(model, device="cpu", **NO_CACHE)
    try:
        prompts = prompts_of(llm, texts, first, num_prompts)
        expected = [answers(llm, [prompt], max_tokens)[0] for prompt in prompts]
    finally:
        llm.close()
    differences: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, dict[str, Any]] = {
            "device": {"speculation": "off"},
            "chunks of 61, one thread": {"max_batch_tokens": 61, "num_threads": 1, "speculation": "off"},
            "host": {**SMALL, "host_cache": "400MB"},
            "disk": {**SMALL, "disk_cache": folder, "disk_cache_size": "2GB"},
            "disk, after a restart": {**SMALL, "disk_cache": folder, "disk_cache_size": "2GB"},
            "drafts": {"speculation_adaptive": False},
        }
        for way, settings in ways.items():
            llm = LLM(model, device="cpu", **settings)
            try:
                rounds = [answers(llm, prompts, max_tokens) for _ in range(2)]
            finally:
                llm.close()
            differences[way] = sum(
                answer != wanted for found in rounds for answer, wanted in zip(found, expected, strict=True)
            )
    return differences


def main() -> None:
    """Count and print; exits with 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: the demo's")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first prompt, to count in several runs")
    parser.add_argument("--tokens", type=int, default=12, help="length of an answer")
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS, help="where prompts are cut from")
    options = parser.parse_args()
    model = options.model or demo_model().path
    found = count_differences(
        model, options.prompts, first=options.first, max_tokens=options.tokens, texts=options.text
    )
    table = Table("served from", "answers", "that differ")
    for way, number in found.items():
        table.add_row(way, str(2 * options.prompts), str(number))
    Console().print(table)
    sys.exit(1 if any(found.values()) else 0)


if __name__ == "__main__":
    main()
