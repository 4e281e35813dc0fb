"""Attention over paged KV with torch alone: the path for CUDA and fp32, and the reference of every kernel.

`AttentionStep` is built once per step. Its groups of decodes and prefills, gather indices and masks are the
same in all layers whose queries see the same tokens, so they are built on first use and kept.

- A layer first writes the new tokens' KV into their slots, then reads through block tables. So where KV is
  stored as codes, every query sees what the codes say, of its own chunk's tokens too.
- Decodes of similar context length are batched: groups double in length, so padding is at most one half.
- Query heads that share a KV head are packed, ``[B, Hk, H / Hk, D]``: one matrix product reads the KV once.
  (torch's own `enable_gqa` repeats K and V first and is over ten times slower for decode.)
- A prefill chunk over cached context takes a mask; a whole prompt is plain causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.attention import AttentionCall, Sight
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.kv_format import KVRows
from stemma.model.attend.latent import LatentProjection
from stemma.model.attend.selection import Selection, choose

PACKED_QUERIES = 32
"""Chunks up to this many queries pack heads; for longer ones torch repeats K and V, which is then cheap."""


@dataclass(slots=True)
class DecodeGroup:
    """Sequences with one query each and a similar number of visible blocks."""

    rows: torch.Tensor
    """[B] int64: their rows in the batch."""
    blocks: torch.Tensor
    """[B, N] int64: the visible blocks, padded with block 0."""
    mask: torch.Tensor
    """[B, 1, 1, N * block_size] bool: True where a token is visible."""


@dataclass(slots=True)
class PrefillChunk:
    """Several query tokens of one sequence over its context."""

    start: int
    stop: int
    """Rows of the batch."""
    blocks: torch.Tensor
    """[N] int64: blocks from the first visible token on."""
    num_keys: int
    """Tokens to read from those blocks."""
    mask: torch.Tensor | None
    """[queries, num_keys] bool; None: plain causal attention over the chunk itself."""


@dataclass(slots=True)
class Plan:
    """The groups of a step for layers whose queries see the same tokens."""

    decodes: list[DecodeGroup]
    chunks: list[PrefillChunk]


class AttentionStep:
    """Context of one forward pass: the batch, the KV it reads and writes, and what layers share."""

    def __init__(self, batch: ForwardBatch, kv: DeviceKV, *, longer_than: int = 0) -> None:
        """Cover the sequences of `batch` with more than `longer_than` query tokens."""
        block_size = kv.layout.block_size
        self._batch = batch
        self._kv = kv
        self._longer_than = longer_than
        self._block_size = block_size
        slots = batch.slots if batch.written_rows is None else batch.slots[batch.written_rows]
        self._slot_blocks = slots // block_size
        self._slot_offsets = slots % block_size
        self._plans: dict[Sight, Plan] = {}
        self._chosen: list[torch.Tensor] = []
        """The tokens that each sequence's queries chose last, [n, C] bool."""

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the KV of the new tokens, then attend; see `StepContext.attend`."""
        rows = self.write(call, key, value)
        if call.selection is not None and call.selection.chooses(self._batch.context_lens):
            return self._attend_selected(call, call.selection, query, rows[0])
        value_dim = value.shape[-1] if call.latent is None else call.latent.value_dim
        output = query.new_empty(query.shape[0], query.shape[1], value_dim)
        self.read(call, query, rows, output)
        return output

    def write(
        self, call: AttentionCall, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[KVRows, KVRows | None]:
        """Write new KV into its slots; return the layer's keys and values (None: they are latents)."""
        if (rows := self._batch.written_rows) is not None:
            key, value = key[rows], value[rows]
        keys = KVRows(self._kv, call.layer_idx, 0, key.shape[-1])
        keys.write(self._slot_blocks, self._slot_offsets, key)
        if call.latent is not None:
            return keys, None
        values = KVRows(self._kv, call.layer_idx, 1, value.shape[-1])
        values.write(self._slot_blocks, self._slot_offsets, value)
        return keys, values

    def read(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        rows: tuple[KVRows, KVRows | None],
        output: torch.Tensor,
    ) -> None:
        """Attend to KV that is written already; fill the covered rows of `output` [T, H, Dv]."""
        latent = call.latent
        plan = self._plan(call.sight)
        for group in plan.decodes:
            queries = query[group.rows]
            keys, values = _gather(rows, group.blocks, latent)
            if latent is None:
                output[group.rows] = _decode(call, queries, keys, values, group)
            else:
                weighted = _decode(call, latent.absorb(queries), keys, values, group)
                output[group.rows] = latent.project(weighted)
        for chunk in plan.chunks:
            queries = query[chunk.start : chunk.stop]
            gathered = _gather(rows, chunk.blocks, latent)
            keys, values = (part.flatten(0, 1)[: chunk.num_keys] for part in gathered)
            target = output[chunk.start : chunk.stop]
            if latent is None:
                target.copy_(_prefill(call, queries, keys, values, chunk.mask))
            elif chunk.mask is not None and len(queries) <= latent.max_absorbed_queries:
                weighted = _prefill(call, latent.absorb(queries), keys, values, chunk.mask)
                target.copy_(latent.project(weighted))
            else:
                target.copy_(_prefill(call, queries, *latent.expand(keys[:, 0]), chunk.mask))

    def _attend_selected(
        self, call: AttentionCall, selection: Selection, query: torch.Tensor, rows: KVRows
    ) -> torch.Tensor:
        """Attend with each query to the latents that it chooses; [T, H, Dv]."""
        latent, parts = call.latent, []
        assert latent is not None
        for seq, context_len in enumerate(self._batch.context_lens):
            start, stop = self._batch.query_starts[seq : seq + 2]
            num_blocks = -(-context_len // self._block_size)
            blocks = self._batch.block_tables[seq, :num_blocks].to(self._kv.device, torch.int64)
            keys = rows.gather(blocks).flatten(0, 1)[:context_len]
            if selection.scoring is not None:
                del self._chosen[seq:]
                self._chosen.append(choose(selection, slice(start, stop), keys[:, 0]))
            latents = keys[..., : latent.rank + latent.rope_dim]
            absorbed = latent.absorb(query[start:stop])
            parts.append(_prefill(call, absorbed, latents, latents[..., : latent.rank], self._chosen[seq]))
        return latent.project(torch.cat(parts))

    def _plan(self, sight: Sight) -> Plan:
        plan = self._plans.get(sight)
        if plan is None:
            plan = self._plans[sight] = self._make_plan(sight)
        return plan

    def _make_plan(self, sight: Sight) -> Plan:
        starts = self._batch.query_starts
        buckets: dict[int, list[tuple[int, int, int]]] = {}
        chunks: list[PrefillChunk] = []
        for seq, context_len in enumerate(self._batch.context_lens):
            num_queries = starts[seq + 1] - starts[seq]
            if num_queries <= self._longer_than:
                continue
            if num_queries > 1:
                chunks.append(self._make_chunk(seq, sight))
            else:
                first, last = self._visible_blocks(context_len - 1, context_len, sight)
                buckets.setdefault((last - first - 1).bit_length(), []).append((seq, first, last))
        groups = [self._make_group(bucket, sight) for bucket in buckets.values()]
        return Plan(groups, chunks)

    def _visible_blocks(self, first_position: int, context_len: int, sight: Sight) -> tuple[int, int]:
        """Return the half-open range of blocks that the query at `first_position` and later ones may see."""
        first_token = int(replace(sight, first_key=0).first(np.array([first_position]))[0])
        return first_token // self._block_size, -(-context_len // self._block_size)

    def _make_group(self, members: list[tuple[int, int, int]], sight: Sight) -> DecodeGroup:
        num_blocks = max(last - first for _, first, last in members)
        tables = self._batch.block_tables
        blocks = torch.zeros(len(members), num_blocks, dtype=torch.int64)
        lens = torch.empty(len(members), 1, dtype=torch.int64)
        origins = torch.empty(len(members), 1, dtype=torch.int64)
        for row, (seq, first, last) in enumerate(members):
            blocks[row, : last - first] = tables[seq, first:last]
            lens[row, 0] = self._batch.context_lens[seq]
            origins[row, 0] = first * self._block_size
        positions = torch.arange(num_blocks * self._block_size) + origins
        mask = positions < lens
        if not sight.is_whole:
            mask &= positions >= torch.from_numpy(sight.first((lens - 1).numpy()))
        rows = torch.tensor([self._batch.query_starts[seq] for seq, _, _ in members])
        device = self._kv.device
        return DecodeGroup(rows.to(device), blocks.to(device), mask[:, None, None].to(device))

    def _make_chunk(self, seq: int, sight: Sight) -> PrefillChunk:
        start, stop = self._batch.query_starts[seq : seq + 2]
        context_len = self._batch.context_lens[seq]
        num_queries = stop - start
        first_position = context_len - num_queries
        first, last = self._visible_blocks(first_position, context_len, sight)
        blocks = self._batch.block_tables[seq, first:last].to(self._kv.device, torch.int64)
        origin = first * self._block_size
        mask = None
        lows = sight.first(np.arange(first_position, context_len))
        if first_position > 0 or lows.any():
            queries = torch.arange(first_position, context_len, device=self._kv.device)[:, None]
            keys = torch.arange(origin, context_len, device=self._kv.device)
            mask = (keys <= queries) & (keys >= torch.from_numpy(lows).to(keys.device)[:, None])
        return PrefillChunk(start, stop, blocks, context_len - origin, mask)


def _gather(
    rows: tuple[KVRows, KVRows | None], blocks: torch.Tensor, latent: LatentProjection | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of blocks [...] as [..., block_size, Hk, D]."""
    keys = rows[0].gather(blocks)
    if rows[1] is not None:
        return keys, rows[1].gather(blocks)
    assert latent is not None, "keys without values"
    return keys[..., : latent.rank + latent.rope_dim], keys[..., : latent.rank]


def _decode(
    call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup
) -> torch.Tensor:
    """q [B, H, D] over gathered k, v [B, N, block_size, Hk, D] -> [B, H, Dv]."""
    keys, values = keys.flatten(1, 2).transpose(1, 2), values.flatten(1, 2).transpose(1, 2)
    batch_size, num_kv_heads = keys.shape[:2]
    packed = query.reshape(batch_size, num_kv_heads, -1, query.shape[-1])
    sinks = None if call.sinks is None else call.sinks.view(num_kv_heads, -1, 1)
    output = _attend_dense(call, packed, keys, values, group.mask, sinks)
    return output.reshape(batch_size, query.shape[1], -1)


def _prefill(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """q [n, H, D] over k, v [C, Hk, D] -> [n, H, Dv]; without a mask attention is causal and n equals C."""
    num_queries, num_heads = query.shape[:2]
    num_kv_heads = keys.shape[1]
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    group_size = num_heads // num_kv_heads
    if mask is not None and group_size > 1 and num_queries <= PACKED_QUERIES:
        packed = query.view(num_queries, num_kv_heads, group_size, -1).permute(1, 2, 0, 3).flatten(1, 2)
        sinks = None
        if call.sinks is not None:
            sinks = call.sinks.view(num_kv_heads, group_size, 1).repeat_interleave(num_queries, 1)
        output = _attend_dense(call, packed[None], keys, values, mask.repeat(group_size, 1), sinks)
        output = output.view(num_kv_heads, group_size, num_queries, -1).permute(2, 0, 1, 3)
        return output.flatten(1, 2)
    sinks = None if call.sinks is None else call.sinks.view(num_heads, 1, 1)
    return _attend_dense(call, query.transpose(0, 1)[None], keys, values, mask, sinks)[0].transpose(0, 1)


def _attend_dense(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [B, H, n, D] over k, v [B, Hk, C, D] -> [B, H, n, Dv]; without a mask attention is causal.

    `sinks` are [H, n or 1, 1].
    """
    if call.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=call.scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
    group_size = query.shape[1] // keys.shape[1]
    if group_size > 1:
        keys, values = keys.repeat_interleave(group_size, 1), values.repeat_interleave(group_size, 1)
    scores = torch.matmul(query, keys.transpose(2, 3)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        beside = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, beside), dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights[..., : values.shape[-2]], values)
