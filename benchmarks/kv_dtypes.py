"""What KV as codes costs and brings: `python -m benchmarks.kv_dtypes [--context N] [--text FILE]`.

For each `kv_cache_dtype`, beside KV in the model's dtype (bfloat16): tokens per gigabyte; a decode step over
`--context` tokens of KV, of which the part that grows with the context is attention; and with `--text` the
perplexity, cut into pieces of 1,000 tokens. Steps of all dtypes are run in turns; the fastest of each counts.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.attention import BLOCK_SIZE, Case, make_batch
from stemma.config.settings import KVDtype, ModelSettings
from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch
from stemma.model.load.demo import DEMO, resolve_checkpoint
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.text.tokenizer import Tokenizer

DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)
SHORT = 16
"""Tokens of context of a step that takes no time to attend."""
PIECE, CHUNK = 1000, 250
"""Tokens of a text that are one prompt, and of a prompt that are one step."""


@dataclass
class Figures:
    """Of one dtype."""

    tokens_per_gigabyte: float
    step_ms: float = math.inf
    perplexity: float | None = None


def fill(model: CausalLM, dtype: KVDtype, case: Case) -> tuple[ForwardBatch, DeviceKV]:
    """Return a decode over KV of any content; one number in all codes and scales is as good as another."""
    batch, num_blocks = make_batch(case)
    kv = DeviceKV(model.layout(BLOCK_SIZE, dtype), num_blocks)
    generator = torch.Generator().manual_seed(0)
    raw = kv.data.view(torch.uint8).view(-1)
    raw.copy_(torch.randint(0, 60, (len(raw),), generator=generator, dtype=torch.uint8))
    return batch, kv


def step_times(model: CausalLM, context: int, batch_size: int, rounds: int) -> tuple[list[float], float]:
    """Return the least milliseconds of a step of each dtype, and of one over no context."""
    cases = [(dtype, Case("", [context] * batch_size, [1] * batch_size)) for dtype in DTYPES]
    cases.append(("auto", Case("", [SHORT] * batch_size, [1] * batch_size)))
    steps = [fill(model, dtype, case) for dtype, case in cases]
    best = [math.inf] * len(steps)
    for _ in range(rounds):
        for number, (batch, kv) in enumerate(steps):
            start = perf_counter()
            model.forward(batch, kv)
            best[number] = min(best[number], 1e3 * (perf_counter() - start))
    return best[:-1], best[-1]


def perplexity(model: CausalLM, tokens: torch.Tensor, dtype: KVDtype) -> float:
    """Return the perplexity of pieces of a text, each computed in chunks."""
    total, count = 0.0, 0
    kv = DeviceKV(model.layout(BLOCK_SIZE, dtype), -(-PIECE // BLOCK_SIZE))
    for piece in torch.split(tokens[: len(tokens) // PIECE * PIECE], PIECE):
        logits = torch.cat([run_chunk(model, piece, start, kv) for start in range(0, PIECE, CHUNK)])
        logprobs = torch.log_softmax(logits[:-1], dim=-1)
        total -= float(logprobs.gather(1, piece[1:, None]).double().sum())
        count += PIECE - 1
    return math.exp(total / count)


def run_chunk(model: CausalLM, piece: torch.Tensor, start: int, kv: DeviceKV) -> torch.Tensor:
    """Return the logits [CHUNK, vocab] of the tokens from `start` on."""
    positions = torch.arange(start, start + CHUNK)
    batch = ForwardBatch(
        token_ids=piece[start : start + CHUNK],
        positions=positions,
        slots=positions,
        query_starts=[0, CHUNK],
        context_lens=[start + CHUNK],
        block_tables=torch.arange(kv.num_blocks, dtype=torch.int32)[None],
        logits_rows=torch.arange(CHUNK),
    )
    return model.forward(batch, kv)


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--text", type=Path, help="a text file; perplexity takes much longer than the steps")
    parser.add_argument("--max-tokens", type=int, default=6000, help="of the text")
    options = parser.parse_args()
    path = resolve_checkpoint(options.model)
    model = load_model(ModelSettings(path=path, device="cpu", dtype="bfloat16"))
    figures = [Figures(1e9 / model.layout(BLOCK_SIZE, dtype).bytes_per_token) for dtype in DTYPES]
    times, without = step_times(model, options.context, options.batch, options.rounds)
    for one, time in zip(figures, times, strict=True):
        one.step_ms = time
    if options.text is not None:
        text = options.text.read_text(encoding="utf-8")
        tokens = torch.from_numpy(Tokenizer(path).encode(text)[: options.max_tokens]).long()
        for one, dtype in zip(figures, DTYPES, strict=True):
            one.perplexity = perplexity(model, tokens, dtype)
    table = Table(
        "KV", "tokens per GB", "of auto", "step, ms", "attention, ms", "of auto", "perplexity", "more"
    )
    plain = figures[0]
    for dtype, one in zip(DTYPES, figures, strict=True):
        attention, plain_attention = one.step_ms - without, plain.step_ms - without
        texts = ["", ""]
        if one.perplexity is not None and plain.perplexity is not None:
            texts = [f"{one.perplexity:.3f}", f"{one.perplexity / plain.perplexity - 1:+.2%}"]
        table.add_row(
            dtype,
            f"{one.tokens_per_gigabyte:,.0f}",
            f"{one.tokens_per_gigabyte / plain.tokens_per_gigabyte:.2f}",
            f"{one.step_ms:.2f}",
            f"{attention:.2f}",
            f"{attention / plain_attention:.2f}",
            *texts,
        )
    console = Console()
    console.print(
        f"decode, batch {options.batch}, context {options.context}; without context {without:.2f} ms"
    )
    console.print(table)


if __name__ == "__main__":
    main()
