"""Offline batches: share of the best possible hits, and time, beside vLLM's.

``python -m benchmarks.batches [--data DIR] [--vllm PYTHON]``: a table of 10,000 rows whose columns repeat,
and with `--data` GSM8K with 8 worked examples and MMLU with 5 of each subject; shuffled, one token answered.
KV memory holds `--kv-tokens` in both. The best possible: every token that any two prompts share at their
beginnings is computed once. `--vllm` names the interpreter of an environment that has vLLM; it gets the same
token ids.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from stemma import LLM, SamplingParams
from stemma.cli.random_text import TextMaker
from stemma.model.load.demo import demo_model
from stemma_lab.measure.workloads import WorkloadOptions, few_shot

KV_BYTES_A_TOKEN = 30 * 2 * 3 * 64 * 2
"""Of SmolLM2-135M in bfloat16."""
PEER = Path(__file__).parent / "peers" / "vllm_batch.py"
BLOCK_SIZE = 16
"""That of vLLM."""
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Batch:
    """A workload as token ids."""

    name: str
    prompts: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    def num_shareable(self) -> int:
        """Return the most tokens that any order can find, whatever the memory."""
        total = 0
        ordered = sorted(self.prompts)
        for before, one in pairwise(ordered):
            num = min(len(before), len(one))
            differs = np.nonzero(np.asarray(before[:num]) != np.asarray(one[:num]))[0]
            total += min(int(differs[0]) if len(differs) else num, len(one) - 1)
        return total


def few_shot_texts(data: Path, num_requests: int, num_shots: int, seed: int) -> list[str]:
    """Return questions after worked examples."""
    options = WorkloadOptions(num_requests=num_requests, num_shots=num_shots, data=data)
    rng = random.Random(seed)
    return [one.turns[0] for one in few_shot(options, TextMaker(rng), rng)]


def table_texts(num_rows: int, seed: int = 7) -> list[str]:
    """Return one question for each row of a table: a shop of 6, a product of 80 with a text, an order."""
    rng = random.Random(seed)
    maker = TextMaker(rng)
    shops = [maker.text(30) for _ in range(6)]
    products = [maker.text(60) for _ in range(80)]
    rows = [
        f"Shop: {rng.choice(shops)}\nProduct: {rng.choice(products)}\nOrder {n}: {maker.text(8)}\nReply:"
        for n in range(num_rows)
    ]
    rng.shuffle(rows)
    return rows


def stemma_run(model: Path, batch: Batch, kv_tokens: int) -> tuple[int, float]:
    """Return the cached tokens and the seconds."""
    llm = LLM(model, kv_cache_memory=kv_tokens * KV_BYTES_A_TOKEN, speculation="off", block_size=BLOCK_SIZE)
    llm.generate("warm", ONE)
    begun = time.perf_counter()
    cached = sum(one.cache.num_cached_tokens for _, one in llm.generate_batch(batch.prompts, ONE))
    seconds = time.perf_counter() - begun
    llm.close()
    return cached, seconds


def vllm_run(python: Path, model: Path, batch: Batch, kv_tokens: int) -> tuple[int, float]:
    """Return the same of vLLM, in a process of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(batch.prompts, file)
        file.flush()
        command = [str(python), str(PEER), str(model), file.name, str(kv_tokens)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return int(found["cached"]), float(found["seconds"])


def main(
    data: Annotated[
        Path | None, typer.Option(help="Folder with gsm8k_test.jsonl and mmlu/; without it, the table alone.")
    ] = None,
    vllm: Annotated[Path | None, typer.Option(help="Interpreter that has vLLM.")] = None,
    kv_tokens: Annotated[int, typer.Option(help="Tokens of KV memory.")] = 16_384,
    rows: Annotated[int, typer.Option(help="Rows of the table.")] = 10_000,
    questions: Annotated[int, typer.Option(help="Questions of GSM8K and of MMLU.")] = 400,
) -> None:
    model = demo_model().path
    tokenizer = LLM(model, kv_cache_memory="64MB").tokenizer
    texts: dict[str, Callable[[], list[str]]] = {}
    if data is not None:
        texts["GSM8K 8-shot"] = lambda: few_shot_texts(data / "gsm8k_test.jsonl", questions, 8, 1)
        texts["MMLU 5-shot"] = lambda: few_shot_texts(data / "mmlu", questions, 5, 2)
    texts[f"table of {rows:,} rows"] = lambda: table_texts(rows)
    for name, make in texts.items():
        batch = Batch(name, [tokenizer.encode(text).tolist() for text in make()])
        best = batch.num_shareable()
        print(f"{name}: {len(batch.prompts)} prompts, {batch.num_tokens:,} tokens, {best:,} shareable")
        runs = {"stemma": stemma_run(model, batch, kv_tokens)}
        if vllm is not None:
            runs["vllm"] = vllm_run(vllm, model, batch, kv_tokens)
        for who, (cached, seconds) in runs.items():
            print(
                f"  {who:<7} {cached:>9,} cached, {cached / best:6.1%} of the best, {seconds:7.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
