"""Drives a `CausalLM` the way the engine does, with shuffled blocks, and keeps the logits of every row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from stemma.config.settings import KVDtype
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import StoredAs
from stemma.model.attend.batch import ForwardBatch, PageTables, StateMoves
from stemma.model.attend.kv_format import decode, encode
from stemma.model.load.prediction import PredictingDecoder
from stemma.model.lora.adapter import AdapterRows
from stemma.model.opened.causal_lm import CausalLM


class CodedCache(DynamicCache):
    """transformers' cache over KV that is stored as codes: layers read `decode(encode(...))`."""

    def __init__(self, stored: StoredAs) -> None:
        super().__init__()
        self._stored = stored

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take [1, heads, T, D]; of latents, the compressed part and the rotary key, each with its scale."""
        keys, values = self._read_back(key_states), self._read_back(value_states)
        return super().update(keys, values, layer_idx, *args, **kwargs)

    def _read_back(self, states: torch.Tensor) -> torch.Tensor:
        dims = (states.shape[-1],)
        return decode(*encode(states, self._stored, dims), self._stored, dims, states.dtype)


def coded_logits(
    path: Path, tokens: Sequence[int], stored: StoredAs, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Logits of plain transformers, eager attention, over a `CodedCache`: [T, vocab] float32."""
    with torch.inference_mode():
        output = _plain_model(path, dtype)(
            torch.tensor([tokens]), past_key_values=CodedCache(stored), use_cache=True
        )
    logits: torch.Tensor = output.logits[0]
    return logits.float()


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
        self,
        model: CausalLM,
        prompts: Sequence[Sequence[int]],
        *,
        block_size: int = 8,
        seed: int = 0,
        adapters: Sequence[object | None] | None = None,
        kv_dtype: KVDtype = "auto",
        frees_windows: bool = False,
    ) -> None:
        """`adapters`: what `prepare_adapter` returned, for each prompt; None: the base model."""
        self.model = model
        self.adapters = list(adapters or [None] * len(prompts))
        self.prompts = [list(prompt) for prompt in prompts]
        self.block_size = block_size
        num_blocks = sum(-(-len(p) // block_size) for p in prompts) + 3
        layout = model.layout(block_size, kv_dtype, frees_windows=frees_windows)
        self.has_states = layout.state is not None
        num_blocks = layout.aligned(num_blocks)
        num_states = len(prompts) if self.has_states else 0
        num_pages = 0 if layout.windows is None else num_blocks
        self.kv = DeviceKV(layout, num_blocks, num_states=num_states, num_pages=num_pages)
        # Whatever other requests left behind must not shine through.
        self.kv.data.fill_(1e3 if kv_dtype == "auto" else 0x47)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tables: list[list[int]] = [[] for _ in prompts]
        self.done = [0] * len(prompts)
        self.hidden: list[torch.Tensor | None] = [None] * len(prompts)
        """Of a model with an MTP layer: its hidden state of each sequence's last token."""
        vocab = model.vocab_size
        self.logits = [torch.full((len(p), vocab), float("nan")) for p in prompts]

    def reuse(self, source: int, target: int, num_tokens: int) -> None:
        """Give `target` the first `num_tokens` of `source`: whole blocks shared, the rest copied."""
        full, rest = divmod(num_tokens, self.block_size)
        self.tables[target] = self.tables[source][:full]
        if rest:
            block = self.free.pop()
            self.kv.copy_block_head(self.tables[source][full], block, rest)
            if self.kv.num_pages:
                last = self.kv.num_pages - 1
                self.kv.copy_page(last - self.tables[source][full], last - block)
            self.tables[target].append(block)
        self.done[target] = num_tokens
        self.logits[target][:num_tokens] = self.logits[source][:num_tokens]

    def step(self, plan: Sequence[tuple[int, int]], wanted: Sequence[int] | None = None) -> torch.Tensor:
        """Run one forward pass; `plan` lists (sequence, number of its next tokens).

        Returns the logits, of these rows of the batch if `wanted` is given; they are kept otherwise.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, contexts = [0], []
        order = list(dict.fromkeys(id(self.adapters[seq]) for seq, _ in plan))
        plan = sorted(plan, key=lambda item: order.index(id(self.adapters[item[0]])))
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
            logits_rows=torch.tensor(range(len(token_ids)) if wanted is None else wanted, dtype=torch.int64),
            adapters=self._adapter_rows(plan, starts),
            states=self._state_moves(plan) if self.has_states else None,
        )
        if self.kv.num_pages:
            batch.pages = self._pages(batch, [self.done[seq] for seq, _ in plan])
        decoder = self.model.decoder
        if isinstance(decoder, PredictingDecoder):
            zeros = torch.zeros(decoder.hidden_size, dtype=decoder.dtype)
            before = [self.hidden[seq] for seq, _ in plan]
            batch.previous_hidden = torch.stack([zeros if one is None else one for one in before])
        logits = self.model.forward(batch, self.kv)
        if isinstance(decoder, PredictingDecoder):
            for row, (seq, _) in enumerate(plan):
                self.hidden[seq] = decoder.hidden[starts[row + 1] - 1].clone()
        for row, (seq, num_tokens) in enumerate(plan):
            if wanted is None:
                self.logits[seq][self.done[seq] : self.done[seq] + num_tokens] = logits[
                    starts[row] : starts[row + 1]
                ]
            self.done[seq] += num_tokens
        return logits

    def _pages(self, batch: ForwardBatch, firsts: Sequence[int]) -> PageTables:
        """Return a page for each block, in another order, and none for what no token sees.

        `firsts`: each sequence's first position in the batch.
        """
        windows, size = self.kv.layout.windows, self.block_size
        assert windows is not None
        last = self.kv.num_pages - 1
        tables = last - batch.block_tables
        for row, first in enumerate(firsts):
            tables[row, : max(0, first - windows.window + 1) // size] = 0
        slots = (last - batch.slots // size) * size + batch.slots % size
        return PageTables(slots, tables)

    def _state_moves(self, plan: Sequence[tuple[int, int]]) -> StateMoves:
        """Each sequence has the state of its own number."""
        initial = tuple(seq if self.done[seq] else None for seq, _ in plan)
        return StateMoves(initial, tuple(seq for seq, _ in plan), ())

    def _adapter_rows(
        self, plan: Sequence[tuple[int, int]], starts: Sequence[int]
    ) -> tuple[AdapterRows, ...]:
        ends: dict[int, tuple[object, int, int]] = {}
        for row, (seq, _) in enumerate(plan):
            if (adapter := self.adapters[seq]) is not None:
                first = ends.get(id(adapter), (adapter, starts[row], 0))[1]
                ends[id(adapter)] = adapter, first, starts[row + 1]
        return tuple(AdapterRows(a, (first, last), (first, last)) for a, first, last in ends.values())

    def finish(self, chunk: int) -> None:
        """Run all sequences to their ends, `chunk` tokens of each a step."""
        while plan := [
            (seq, min(chunk, len(prompt) - self.done[seq]))
            for seq, prompt in enumerate(self.prompts)
            if self.done[seq] < len(prompt)
        ]:
            self.step(plan)


def single_tokens(run: PagedSequences, token_ids: torch.Tensor, positions: list[int]) -> ForwardBatch:
    """Return a batch of one token of each sequence of `run`."""
    tables = np.zeros((len(positions), max(map(len, run.tables))), dtype=np.int32)
    for row, table in enumerate(run.tables):
        tables[row, : len(table)] = table
    size = run.block_size
    slots = [int(tables[row, at // size]) * size + at % size for row, at in enumerate(positions)]
    return ForwardBatch(
        token_ids=token_ids,
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=list(range(len(positions) + 1)),
        context_lens=[at + 1 for at in positions],
        block_tables=torch.from_numpy(tables),
        logits_rows=torch.empty(0, dtype=torch.int64),
    )
