"""A step of context parallel ranks: each computes the rows of its tokens; attention meets the keys of all.

Decodes and short chunks send their queries to all ranks and get partial results back. Of long chunks the
keys go around the ranks in a ring, a layer at a time (ring attention, arXiv:2310.01889), while each rank
attends to those that it has. Either way a row's partial results are the same to the bit (partial.py), so
the choice is one of bytes (dealing.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import DTYPE_BYTES, KVLayout
from stemma.model.attend.attention import AttentionCall, Sight
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.paged import AttentionStep
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.model.cpu.packing import Packing
from stemma.model.foreign.attention import AttentionProbe
from stemma.model.foreign.decoder import ModuleDecoder
from stemma.model.foreign.weights import ModuleWeights
from stemma.model.parallel.dealing import Dealing, DealtStep, Integers, Queries, Sizes
from stemma.model.parallel.group import RankGroup
from stemma.model.parallel.partial import (
    EXTRA,
    NativePartials,
    PartialAttention,
    TorchPartials,
    value_dim_of,
)


@dataclass(frozen=True, slots=True)
class PassedKV:
    """Blocks of one layer that another rank holds, as they were received."""

    layout: KVLayout
    rows: torch.Tensor
    """As `DeviceKV.layer`."""

    def layer(self, _index: int) -> torch.Tensor:
        """Return the rows."""
        return self.rows


class ContextStep:
    """`StepContext` of one rank."""

    def __init__(
        self,
        step: DealtStep,
        kv: DeviceKV,
        group: RankGroup,
        partial: PartialAttention,
        writer: AttentionStep | NativeAttentionStep,
    ) -> None:
        """`writer` writes the KV of this rank's rows."""
        self._step = step
        self._kv = kv
        self._group = group
        self._partial = partial
        self._writer = writer
        self._lows: dict[tuple[int, Sight], npt.NDArray[np.int32] | None] = {}
        """By queries, window and first key: the same in many layers."""

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Take q, k and v of this rank's rows; see `StepContext.attend`."""
        self._writer.write(call, key, value)
        if call.latent is not None:
            query = call.latent.absorb(query)
        parts = self.exchange(call, query, value_dim_of(call, value.shape[2]))
        output = self._partial.merge(call, parts, query.dtype)
        return output if call.latent is None else call.latent.project(output)

    def exchange(self, call: AttentionCall, query: torch.Tensor, value_dim: int) -> torch.Tensor:
        """Attend together with the other ranks, which do the same; q [T, H, D] may be empty.

        Returns the partial results of each rank for our rows, [ranks, T, H, value_dim + 2] float32.
        """
        shape = self._group.share.context_size, *query.shape[:2], value_dim + EXTRA
        parts = query.new_zeros(shape, dtype=torch.float32)
        if self._step.asking.positions.size:
            self._ask(call, query, parts)
        if len(self._step.passed_blocks):
            self._pass_keys(call, query, parts)
        return parts

    def _ask(self, call: AttentionCall, query: torch.Tensor, parts: torch.Tensor) -> None:
        """Send queries to the keys of all ranks, answer theirs, and fill `parts`."""
        step, size = self._step, len(parts)
        sent = torch.from_numpy(step.sent).to(query.device)
        own = query[sent]
        asked = torch.cat(self._group.exchange([own] * size, step.num_asking))
        found = self._attend(call, asked, self._kv, step.asking)
        answers = self._group.exchange(torch.split(found, step.num_asking), [len(own)] * size)
        for rank, answer in enumerate(answers):
            parts[rank, sent] = answer

    def _pass_keys(self, call: AttentionCall, query: torch.Tensor, parts: torch.Tensor) -> None:
        """Let the keys of all ranks come by, and fill `parts`."""
        step, size = self._step, len(parts)
        staying = torch.from_numpy(step.staying).to(query.device)
        own = query[staying]
        blocks = torch.from_numpy(step.passed_blocks).to(query.device)
        rows = self._kv.layer(call.layer_idx)[blocks].contiguous()
        for turn in range(size):
            source = (self._group.share.context_rank - turn) % size
            passing = self._group.pass_on(rows) if turn + 1 < size else None
            if len(own):
                passed = PassedKV(self._kv.layout, rows)
                parts[source, staying] = self._attend(call, own, passed, step.waiting[source])
            if passing is not None:
                rows = passing.wait()

    def _attend(
        self, call: AttentionCall, query: torch.Tensor, source: DeviceKV | PassedKV, queries: Queries
    ) -> torch.Tensor:
        key = id(queries), call.sight
        if key not in self._lows:
            self._lows[key] = self._step.lows(queries, call.sight)
        return self._partial.attend(call, query, source, queries, self._lows[key])


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """A layer's step as a rank without rows needs it to attend for the others."""

    call: AttentionCall
    key_dim: int
    value_dim: int


class ContextDecoder(ModuleDecoder):
    """Runs the rows of one rank. All ranks call `forward` with the same batch, and with KV of their own."""

    def __init__(
        self, hf_model: Any, weights: ModuleWeights, packing: Packing | None, group: RankGroup
    ) -> None:
        """`hf_model` adds up what the ranks compute that divide the model, if they do."""
        super().__init__(hf_model, weights, packing)
        self._group = group
        config = hf_model.config.get_text_config()
        self._vocab_size, self._dtype = int(config.vocab_size), hf_model.dtype
        self._num_heads = config.num_attention_heads // group.share.size
        probe = AttentionProbe()
        self._try(2, probe)
        self._calls = [_LayerCall(call, dim, value) for call, _, dim, value in probe.calls]

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the batch's KV and return logits [L, vocab]: all on rank 0, those of its rows on others.

        `kv` holds this rank's part of each block; slots and block tables are those of whole blocks.
        """
        share = self._group.share
        dealing = Dealing(share.context_size, kv.layout.block_size)
        step = DealtStep(batch, dealing, share.context_rank, self._sizes(kv.layout))
        wanted = batch.logits_rows.cpu().numpy()
        places = [np.flatnonzero(np.isin(wanted, rows)) for rows in step.rows_of]
        own = self._own_batch(batch, dealing, step, wanted[places[share.context_rank]])
        logits = self._compute(own, step, kv)
        if len(wanted) == 0:
            return logits
        return self._collect(logits, places)

    def _sizes(self, layout: KVLayout) -> Sizes:
        one = self._calls[0]
        value_dim = value_dim_of(one.call, one.value_dim)
        found = DTYPE_BYTES["float32"] * (value_dim + EXTRA)
        row = self._num_heads * (layout.head_dim * DTYPE_BYTES[layout.dtype] + found)
        return Sizes(row, layout.block_bytes // layout.num_layers)

    def _own_batch(
        self, batch: ForwardBatch, dealing: Dealing, step: DealtStep, wanted: Integers
    ) -> ForwardBatch:
        """Return this rank's rows; `wanted` are those of the whole batch that need logits."""
        rows, device = step.own_rows, batch.token_ids.device
        slots = dealing.own_slots(self._group.share.context_rank, batch.slots.cpu().numpy()[rows])
        chosen = torch.from_numpy(rows).to(device)
        return replace(
            batch,
            token_ids=batch.token_ids[chosen],
            positions=batch.positions[chosen],
            slots=torch.from_numpy(slots).to(device),
            logits_rows=torch.from_numpy(np.searchsorted(rows, wanted)).to(device),
        )

    def _compute(self, own: ForwardBatch, step: DealtStep, kv: DeviceKV) -> torch.Tensor:
        """Run the model on this rank's rows, or attend for the others; return the own rows' logits."""
        value_dim = self._calls[0].value_dim
        kernels = self._kernels
        partial: PartialAttention
        writer: AttentionStep | NativeAttentionStep
        if kernels is None:
            partial, writer = TorchPartials(value_dim), AttentionStep(own, kv)
        else:
            partial, writer = NativePartials(kernels, value_dim), NativeAttentionStep(own, kv, kernels)
        context = ContextStep(step, kv, self._group, partial, writer)
        try:
            if len(own.token_ids):
                with self.operations or nullcontext():
                    return self.run(own, context)
            own.on_launch()
            for one in self._calls:
                query = torch.empty(0, self._num_heads, one.key_dim, dtype=self._dtype, device=kv.device)
                context.exchange(one.call, query, value_dim_of(one.call, one.value_dim))
            return torch.empty(0, self._vocab_size, dtype=self._dtype, device=kv.device)
        finally:
            partial.close()

    def _collect(self, logits: torch.Tensor, places: list[Integers]) -> torch.Tensor:
        """Send all logits to rank 0; there, return them in the order in which they were wanted."""
        is_first = self._group.share.context_rank == 0
        nothing = logits[:0]
        parts = self._group.exchange(
            [logits, *[nothing] * (len(places) - 1)], [len(place) if is_first else 0 for place in places]
        )
        if not is_first:
            return logits
        whole = logits.new_empty(sum(map(len, places)), logits.shape[1])
        for place, part in zip(places, parts, strict=True):
            whole[torch.from_numpy(place).to(logits.device)] = part
        return whole
