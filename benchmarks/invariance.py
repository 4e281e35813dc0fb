"""Answers of a model with and without a cache: `python -m benchmarks.invariance [--prompts N]`.

Prompts are cut from text files (the project's documentation by default), several of them with the same
beginning. Each is answered at temperature 0 and 1, alone, cold, with no cache; then alone from the cache, all
of them together, in small chunks, from host memory and disk after blocks have moved down, and with drafts.
What is counted are answers of which a token or a log-probability differs in any bit. On CPU with native
kernels that is none. The model is the demo's, or `--model`: a directory or a GGUF file; or `--hybrid`, a
`model_type` of `tests/hybrids.py` with random weights.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from stemma import LLM, SamplingParams
from stemma.model.load.demo import demo_model

TEXTS = tuple(sorted((Path(__file__).parent.parent / "docs").glob("[!r]*/*.md")))
PREFIX_TOKENS, OWN_TOKENS, NUM_SHARING = 400, 50, 5
"""A prompt: so many tokens that it shares with the others of its group, and so many of its own."""

NO_CACHE: dict[str, Any] = {"enable_prefix_cache": False, "max_num_seqs": 1, "speculation": "off"}
TEMPERATURES = (0.0, 1.0)
SMALL_TOKENS, SMALL_STATES, SMALL_STEP = 3400, 24, 512
"""A device for so many tokens, states and tokens of a step: what is asked for again has moved down."""


def prompts_of(
    llm: LLM, texts: Sequence[Path], first: int, num_prompts: int, num_shared: int
) -> list[list[int]]:
    """Cut prompts out of texts: each begins somewhere in one of them and ends somewhere else."""
    tokens: list[list[int]] = [
        llm.tokenizer.encode(path.read_text(encoding="utf-8")).tolist() for path in texts
    ]
    tokens = [one for one in tokens if len(one) > num_shared + OWN_TOKENS]
    rng = random.Random(0)

    def piece(size: int) -> list[int]:
        text = rng.choice(tokens)
        start = rng.randrange(len(text) - size)
        return text[start : start + size]

    prompts: list[list[int]] = []
    while len(prompts) < first + num_prompts:
        prefix = piece(num_shared)
        prompts += [prefix + piece(rng.randrange(1, OWN_TOKENS)) for _ in range(NUM_SHARING)]
    return prompts[first : first + num_prompts]


Asked: TypeAlias = list[tuple[list[int], SamplingParams]]
"""Prompts, and how each is answered."""


def asked_of(prompts: Sequence[list[int]], max_tokens: int, *, by_turns: bool) -> Asked:
    """Return each prompt at each temperature; `by_turns`: at one of them."""
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=one, seed=7, ignore_eos=True, logprobs=1)
        for one in TEMPERATURES
    ]
    if by_turns:
        return [(prompt, params[number % len(params)]) for number, prompt in enumerate(prompts)]
    return [(prompt, how) for prompt in prompts for how in params]


def answers(llm: LLM, asked: Asked) -> list[Any]:
    """Return tokens and log-probabilities of the answers."""
    found = llm.generate([prompt for prompt, _ in asked], [how for _, how in asked])
    return [(one.completions[0].token_ids, one.completions[0].logprobs) for one in found]


def small_device(llm: LLM) -> dict[str, Any]:
    """Return settings of a device that holds `SMALL_TOKENS`."""
    layout = llm.engine.runner.kv.layout
    kv_bytes, rest = SMALL_TOKENS * layout.bytes_per_token, 0
    if layout.windows is not None:
        num_pages = (SMALL_TOKENS + SMALL_STEP) // layout.block_size
        rest = num_pages * layout.blocks_per_page * layout.block_bytes
    elif layout.state is not None:
        rest = (SMALL_STATES * layout.blocks_per_state + 1) * layout.block_bytes
    settings: dict[str, Any] = {"kv_cache_memory": f"{kv_bytes + rest}B", "load_when": "always"}
    return settings | {"max_batch_tokens": SMALL_STEP}


def hybrid_model(family: str, folder: Path) -> Path:
    """Write a model with recurrent layers and random weights; return its directory."""
    from tests import hybrids

    return hybrids.build(family, folder / family, max_position_embeddings=2048)


def count_differences(
    model: Path,
    num_prompts: int,
    *,
    first: int = 0,
    num_shared: int = PREFIX_TOKENS,
    max_tokens: int = 12,
    texts: Sequence[Path] = TEXTS,
    by_turns: bool = False,
) -> dict[str, int]:
    """Return, for each way to serve the prompts, how many of two rounds of answers differ.

    `by_turns`: every second prompt is answered at the second temperature; else all are at both.
    """
    llm = LLM(model, device="cpu", **NO_CACHE)
    try:
        prompts = prompts_of(llm, texts, first, num_prompts, num_shared)
        asked = asked_of(prompts, max_tokens, by_turns=by_turns)
        expected = [answers(llm, [one])[0] for one in asked]
        small = small_device(llm)
    finally:
        llm.close()
    differences: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, dict[str, Any]] = {
            "device, alone": {"max_num_seqs": 1, "speculation": "off"},
            "device, batched": {"speculation": "off"},
            "chunks of 61, one thread": {"max_batch_tokens": 61, "num_threads": 1, "speculation": "off"},
            "host": {**small, "host_cache": "400MB"},
            "disk": {**small, "disk_cache": folder, "disk_cache_size": "2GB"},
            "disk, after a restart": {**small, "disk_cache": folder, "disk_cache_size": "2GB"},
            "drafts": {"speculation_adaptive": False},
        }
        for way, settings in ways.items():
            llm = LLM(model, device="cpu", **settings)
            try:
                rounds = [answers(llm, asked) for _ in range(2)]
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
    parser.add_argument("--shared", type=int, default=PREFIX_TOKENS, help="tokens that five prompts share")
    parser.add_argument("--tokens", type=int, default=12, help="length of an answer")
    parser.add_argument("--by-turns", action="store_true", help="one temperature for each prompt, by turns")
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS, help="where prompts are cut from")
    parser.add_argument("--hybrid", help="a model_type with recurrent layers, e.g. qwen3_next")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if options.hybrid is not None:
            model = hybrid_model(options.hybrid, Path(folder))
        started = time.perf_counter()
        found = count_differences(
            model or demo_model().path,
            options.prompts,
            first=options.first,
            num_shared=options.shared,
            max_tokens=options.tokens,
            texts=options.text,
            by_turns=options.by_turns,
        )
    num_answers = 2 * options.prompts * (1 if options.by_turns else len(TEMPERATURES))
    table = Table("served from", "answers", "that differ")
    for way, number in found.items():
        table.add_row(way, str(num_answers), str(number))
    Console().print(table, f"{time.perf_counter() - started:.0f} s")
    sys.exit(1 if any(found.values()) else 0)


if __name__ == "__main__":
    main()
