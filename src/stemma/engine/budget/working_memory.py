"""The size of KV where process or card has a limit: what libraries, weights and steps leave.

What a step needs beside KV (activations, logits, scratch of the libraries) depends on the architecture and on
how the libraries compute it, so it isn't calculated: a step of the largest size is run and the peak is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stemma.config.settings import EngineSettings
from stemma.config.sizes import format_size
from stemma.engine.drafts.index_memory import reserved_bytes
from stemma.engine.sampling.sampler import rows_at_once
from stemma.errors import ConfigError
from stemma.memory.cache.overhead import bytes_per_block, fixed_bytes
from stemma.memory.device.accelerator import accelerator_of
from stemma.memory.device.block_codec import choose_codec
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.device.sizing import CARD_FRACTION
from stemma.memory.tiers.reserved import planned_bytes
from stemma.model.attend.batch import ForwardBatch, PageTables, StateMoves
from stemma.model.cpu.weights import PREPARED_BYTES
from stemma.model.opened.causal_lm import CausalLM
from stemma.native.process_memory import large_blocks_apart, resident_bytes, trim_heap

_STEPS_RESERVED = 2.0
"""Factor on the measured step: steps of many sizes fragment the heap."""
_SEATS = 64
"""Running sequences where the settings name no number: each takes a row of logits, and KV what is left."""
_MAX_DRAFT_TOKENS = 32
"""Draft tokens in a step: each takes a row of logits, in addition to one for each seat."""


class HeapGuard:
    """Makes malloc return freed memory to the system when the process is near its limit."""

    def __init__(self, high_bytes: int, patience_bytes: int) -> None:
        """Act above `high_bytes`; again only once the process grew by `patience_bytes`."""
        self._threshold = self._high = high_bytes
        self._patience = patience_bytes

    def check(self) -> None:
        """Check after a step; takes tens of us."""
        if resident_bytes() > self._threshold:
            trim_heap()
            self._threshold = max(self._high, resident_bytes() + self._patience)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Keeps a process below its limit."""

    kv_bytes: int
    max_draft_tokens: int
    max_seats: int
    """Running sequences for which a step was measured."""
    guard: HeapGuard


def measured_kv_bytes(model: CausalLM, settings: EngineSettings) -> int:
    """Return the bytes for KV on a device beside the host: its share of the card, less what is taken there.

    That is what is held now, by whatever process, and what a step of the largest size adds. Raises
    ConfigError if nothing is left for KV.
    """
    accelerator, cache = accelerator_of(model.device), settings.cache
    layout = model.layout(cache.block_size, cache.kv_cache_dtype, cache.kv_layout)
    num_tokens = settings.scheduler.max_batch_tokens
    num_logits = min((settings.scheduler.max_num_seqs or _SEATS) + _MAX_DRAFT_TOKENS, num_tokens)
    try:
        step = step_bytes(model, layout, num_tokens, num_logits)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {num_tokens} tokens doesn't fit on {model.device} beside the weights; make "
            "max_batch_tokens smaller"
        ) from error
    total, free = accelerator.total_bytes(), accelerator.free_bytes()
    share = int(total * (cache.kv_cache_fraction or CARD_FRACTION))
    if (kv_bytes := share - (total - free) - step) <= 0:
        raise ConfigError(
            f"{format_size(share)} of {model.device} may be used, but {format_size(total - free)} are taken "
            f"and a step of {num_tokens} tokens takes {format_size(step)}: nothing is left for KV; end "
            "what else uses the card, or choose a smaller max_batch_tokens or a larger kv_cache_fraction"
        )
    return kv_bytes


def plan_memory(limit_bytes: int, model: CausalLM, settings: EngineSettings) -> MemoryPlan:
    """Measure what a step takes, and divide the process's limit among its parts.

    Call it once all libraries are imported and the weights are loaded. Raises ConfigError where it can't be
    measured, and if nothing is left for KV.
    """
    if model.device.type != "cpu":
        raise ConfigError("memory_limit is for CPU; on CUDA give kv_cache_memory or kv_cache_fraction")
    cache = settings.cache
    layout = model.layout(cache.block_size, cache.kv_cache_dtype, cache.kv_layout)
    num_tokens = settings.scheduler.max_batch_tokens
    num_seats = settings.scheduler.max_num_seqs or _SEATS
    num_logits = min(num_seats + _MAX_DRAFT_TOKENS, num_tokens)
    try:
        held = resident_bytes()
        step = step_bytes(model, layout, num_tokens, num_logits)
    except OSError as error:
        raise ConfigError(f"memory_limit needs Linux's /proc: {error}; give kv_cache_memory") from error
    working = int(_STEPS_RESERVED * step) + PREPARED_BYTES
    eviction = settings.cache.eviction
    codec = choose_codec(settings, layout, model.device.type)
    lower = planned_bytes(settings.tiers, settings.cache.pool, layout, eviction, num_tokens, codec)
    drafts = reserved_bytes(settings.speculation)
    left = limit_bytes - held - working - lower - drafts - fixed_bytes(eviction)
    # What the index notes of a block takes memory with each block.
    kv_share = layout.block_bytes / (layout.block_bytes + bytes_per_block(layout.block_size, eviction))
    if (kv_bytes := int(left * kv_share)) <= 0:
        raise ConfigError(
            f"memory_limit is {format_size(limit_bytes)}, but libraries and weights take "
            f"{format_size(held)}, steps {format_size(working)}, lower tiers {format_size(lower)}, "
            f"drafts {format_size(drafts)}, the eviction policy "
            f"{format_size(fixed_bytes(eviction))}: nothing is left for KV"
        )
    return MemoryPlan(kv_bytes, _MAX_DRAFT_TOKENS, num_seats, HeapGuard(limit_bytes - step // 2, step // 2))


def step_bytes(model: CausalLM, layout: KVLayout, num_tokens: int, num_logits: int) -> int:
    """Run a step of that size over KV of that layout.

    Return what the process held on the model's device at its peak beyond now, KV apart.
    """
    accelerator = accelerator_of(model.device)
    lengths = _lengths(num_tokens, num_logits, model.max_model_len)
    with large_blocks_apart():
        num_states = 0 if layout.state is None else len(lengths)
        if accelerator.is_host:
            # Blocks of one token: no more KV than tokens, which for a large model is much.
            layout = layout.of_tokens()
        batch = whole_prompts(lengths, layout.block_size, model.device)
        num_blocks = sum(-(-length // layout.block_size) for length in lengths)
        num_pages = 0 if layout.windows is None else num_blocks
        kv = DeviceKV(
            layout, layout.aligned(num_blocks), model.device, num_states=num_states, num_pages=num_pages
        )
    kv.data.zero_()
    if num_pages:
        batch.pages = PageTables(batch.slots, batch.block_tables)
    if num_states:
        batch.states = StateMoves((None,) * num_states, tuple(range(num_states)), ())
    batch.wants_hidden = model.abilities.needs_hidden
    before = accelerator.held_bytes()
    accelerator.reset_peak()
    logits = model.forward(batch, kv)
    # Penalties copy the logits, and so do log-probabilities.
    some = logits[: rows_at_once(logits)].clone()
    torch.log_softmax(some, dim=-1)
    working = accelerator.peak_bytes() - before
    del kv, logits, some
    trim_heap()
    return working


def _lengths(num_tokens: int, num_rows: int, max_len: int) -> list[int]:
    """Cut up to `num_tokens` into `num_rows` sequences: the first long, the last of one token."""
    lengths = []
    left = num_tokens
    for rows_behind in range(num_rows - 1, -1, -1):
        lengths.append(min(left - rows_behind, max_len))
        left -= lengths[-1]
    return lengths


def whole_prompts(lengths: list[int], block_size: int, device: torch.device) -> ForwardBatch:
    """Return whole prompts of these lengths, each in blocks of its own, counted from 0."""
    ends = np.cumsum(lengths)
    num_blocks = [-(-length // block_size) for length in lengths]
    firsts = np.cumsum([0, *num_blocks[:-1]]).tolist()
    tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
    for row, (first, count) in enumerate(zip(firsts, num_blocks, strict=True)):
        tables[row, :count] = torch.arange(first, first + count)
    positions = torch.cat([torch.arange(length) for length in lengths])
    slots = positions + torch.tensor(firsts).mul(block_size).repeat_interleave(torch.tensor(lengths))
    return ForwardBatch(
        token_ids=torch.zeros_like(slots).to(device),
        positions=positions.to(device),
        slots=slots.to(device),
        query_starts=[0, *ends.tolist()],
        context_lens=lengths,
        block_tables=tables,
        logits_rows=torch.from_numpy(ends - 1).to(device),
    )
