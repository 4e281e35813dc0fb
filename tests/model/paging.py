"""Drives a `CausalLM` the way the engine does, with shuffled blocks, and keeps the logits of every row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from stemma.memory.device.kv import DeviceKV
from stemma.model.batch import ForwardBatch
from stemma.model.causal_lm import CausalLM


@lru_cache(maxsize=32)
def _plain_model(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def plain_logits(path: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of plain transformers, eager attention, no cache: [T, vocab] float32."""
    with torch.inference_mode():
        logits: torch.Tensor = _plain_model(path, dtype)(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()


class PagedSequences:
    """Sequences over one `DeviceKV`; blocks are handed out in random order."""

    def __init__(
        self, model: CausalLM, prompts: Sequence[Sequence[int]], *, block_size: int = 8, seed: int = 0
    ) -> None:
        self.model = model
        self.prompts = [list(prompt) for prompt in prompts]
        self.block_size = block_size
        num_blocks = sum(-(-len(p) // block_size) for p in prompts) + 3
        self.kv = DeviceKV(model.layout(block_size), num_blocks)
        self.kv.data.fill_(1e3)  # whatever other requests left behind must not shine through
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tables: list[list[int]] = [[] for _ in prompts]
        self.done = [0] * len(prompts)
        vocab = model.vocab_size
        self.logits = [torch.full((len(p), vocab), float("nan")) for p in prompts]

    def reuse(self, source: int, target: int, num_tokens: int) -> None:
        """Give `target` the first `num_tokens` of `source`: whole blocks shared, the rest copied."""
        full, rest = divmod(num_tokens, self.block_size)
        self.tables[target] = self.tables[source][:full]
        if rest:
            block = self.free.pop()
            self.kv.copy_block_head(self.tables[source][full], block, rest)
            self.tables[target].append(block)
        self.done[target] = num_tokens
        self.logits[target][:num_tokens] = self.logits[source][:num_tokens]

    def step(self, plan: Sequence[tuple[int, int]]) -> None:
        """Run one forward pass; `plan` lists (sequence, number of its next tokens)."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, contexts = [0], []
        for seq, num_tokens in plan:
            table = self.tables[seq]
            for position in range(self.done[seq], self.done[seq] + num_tokens):
                if position // self.block_size == len(table):
                    table.append(self.free.pop())
                token_ids.append(self.prompts[seq][position])
                positions.append(position)
                slots.append(
                    table[position // self.block_size] * self.block_size + position % self.block_size
                )
            starts.append(len(token_ids))
            contexts.append(self.done[seq] + num_tokens)
        tables = np.zeros((len(plan), max(len(self.tables[seq]) for seq, _ in plan)), dtype=np.int32)
        for row, (seq, _) in enumerate(plan):
            tables[row, : len(self.tables[seq])] = self.tables[seq]
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_starts=starts,
            context_lens=contexts,
            block_tables=torch.from_numpy(tables),
            logits_rows=torch.arange(len(token_ids)),
        )
        logits = self.model.forward(batch, self.kv)
        for row, (seq, num_tokens) in enumerate(plan):
            self.logits[seq][self.done[seq] : self.done[seq] + num_tokens] = logits[
                starts[row] : starts[row + 1]
            ]
            self.done[seq] += num_tokens

    def finish(self, chunk: int) -> None:
        """Run all sequences to their ends, `chunk` tokens of each a step."""
        while plan := [
            (seq, min(chunk, len(prompt) - self.done[seq]))
            for seq, prompt in enumerate(self.prompts)
            if self.done[seq] < len(prompt)
        ]:
            self.step(plan)
