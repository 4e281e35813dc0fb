"""Steps of all sizes before the first request, on devices where a first step compiles, plans and records.

Without them a client waits for each, and what a step is thought to cost is wrong for hundreds of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch

from stemma.config.settings import EngineSettings
from stemma.memory.device.accelerator import accelerator_of
from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch
from stemma.model.files.progress import Progress
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.opened.draw_rules import DrawRules

logger = logging.getLogger(__name__)
_MOST_SEQUENCES = 256
_LONG_CONTEXT = 4096
_LEAST_CHUNK = 16
STAGE = "warming up"


@runtime_checkable
class _Records(Protocol):
    """A decoder that records steps by buckets of its own."""

    def warm_up(self, kv: DeviceKV, progress: Callable[[float], None]) -> None: ...


def warm_up(model: CausalLM, kv: DeviceKV, settings: EngineSettings, progress: Progress | None) -> None:
    """Run steps of each size twice (the second one replays, if the first was recorded), largest first.

    They write into `kv`, which nobody uses yet.
    """
    if isinstance(model.decoder, _Records):
        model.decoder.warm_up(kv, lambda share: progress(STAGE, share) if progress else None)
    most_tokens = settings.scheduler.max_batch_tokens
    most_seqs = min(settings.scheduler.max_num_seqs or _MOST_SEQUENCES, most_tokens)
    shapes = list(step_shapes(kv, model.max_model_len, most_tokens, most_seqs))
    for done, (num_seqs, num_queries, context) in enumerate(shapes):
        if progress is not None:
            progress(STAGE, done / len(shapes))
        batch = _step(kv, num_seqs, num_queries, context)
        batch.wants_hidden = model.abilities.needs_hidden
        try:
            for _ in range(2):
                logits = model.forward(batch, kv)
                if model.choose is not None:
                    model.choose(logits, DrawRules.greedy(len(logits)))
            accelerator_of(kv.device).synchronize()
        except torch.OutOfMemoryError:
            logger.warning(
                "no memory for a step of %d tokens behind %d, which would fail: give less kv_cache_memory",
                len(batch.token_ids),
                context,
            )
    if progress is not None:
        progress(STAGE, 1.0)


def step_shapes(
    kv: DeviceKV, max_len: int, most_tokens: int, most_seqs: int
) -> Iterator[tuple[int, int, int]]:
    """Yield sequences, query tokens of each, and tokens of context: chunks, then decodes that fit in `kv`.

    Decodes behind a long context share all blocks but their last.
    """
    size = kv.layout.block_size
    capacity = kv.num_blocks * size
    longest = min(max_len, _LONG_CONTEXT, capacity)
    num_queries = min(most_tokens, max_len, capacity)
    while num_queries >= min(_LEAST_CHUNK, most_tokens):
        yield 1, num_queries, num_queries
        if longest > num_queries:
            yield 1, num_queries, longest
        num_queries //= 2
    for num_seqs in sorted({*_sizes(most_seqs)}, reverse=True):
        if num_seqs <= kv.num_blocks:
            yield num_seqs, 1, min(size, max_len)
        context = min(longest, capacity // num_seqs)  # torch's attention gathers that much
        if size < context and num_seqs + -(-context // size) <= kv.num_blocks:
            yield num_seqs, 1, context


def _sizes(most: int) -> Iterator[int]:
    """Yield powers of two and what lies halfway between them, up to `most`."""
    power = 1
    while power < most:
        yield from (power, min(most, power * 3 // 2))
        power *= 2
    yield most


def _step(kv: DeviceKV, num_seqs: int, num_queries: int, context: int) -> ForwardBatch:
    """Return the last tokens of so many sequences, whose blocks but the last are the same."""
    size = kv.layout.block_size
    num_blocks = -(-context // size)
    tables = torch.arange(num_blocks, dtype=torch.int32).repeat(num_seqs, 1)
    tables[:, -1] += torch.arange(num_seqs, dtype=torch.int32)
    positions = torch.arange(context - num_queries, context)
    slots = tables[:, positions // size].long() * size + positions % size
    ends = torch.arange(1, num_seqs + 1) * num_queries
    return ForwardBatch(
        token_ids=torch.zeros(num_seqs * num_queries, dtype=torch.int64).to(kv.device),
        positions=positions.repeat(num_seqs).to(kv.device),
        slots=slots.reshape(-1).to(kv.device),
        query_starts=[0, *ends.tolist()],
        context_lens=[context] * num_seqs,
        block_tables=tables,
        logits_rows=(ends - 1).to(kv.device),
    )
