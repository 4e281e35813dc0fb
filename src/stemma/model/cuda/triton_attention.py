"""Paged attention by Triton kernels, used on a CUDA device if Triton is installed.

`TritonAttentionStep` covers a whole step: one launch for sequences with few queries (decodes, drafts) and one
for longer chunks, without gather and mask. Latent layers are absorbed; chunks with too many queries for that
to pay off are expanded and run through torch, as in `model/attend/paged.py`, the reference for all results.

If decodes share prefixes (`shared_prefix.py`), one launch over their stacked queries reads each prefix once.
Layers with a sliding window don't do this, because a prefix soon leaves the window.

The shape of a launch depends only on numbers of queries, never on context lengths. So `model/cuda/graphs.py`
can record a decode once and replay it as contexts grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.kv_format import KVRows
from stemma.model.attend.paged import AttentionStep
from stemma.model.attend.shared_prefix import SharedTensors
from stemma.model.cuda.step_tensors import StepTensors
from stemma.model.cuda.triton_kernels import attend_kernel, reduce_kernel, write_kernel

SHORT_QUERIES = 16
"""Maximum number of queries of sequences that share a launch with small tiles."""

_MIN_DIM = 16
"""The smallest side of a matrix product on tensor cores."""
_MAX_SPLITS = 64
_PROGRAMS_PER_MULTIPROCESSOR = 2
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Sizes of one launch of `attend_kernel`."""

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TileLaunch:
    """The tiles of one launch, [num_tiles, 2] int32 (sequence, number of the tile in it), and its shape."""

    tiles: torch.Tensor
    shape: LaunchShape
    has_decodes: bool


@dataclass(frozen=True, slots=True)
class Partials:
    """Weighted sums of pieces of contexts, [rows * pieces, value dim], and their log2 weights, float32."""

    sums: torch.Tensor
    weights: torch.Tensor
    num_pieces: int
    """Log2 weight of each row."""

    @classmethod
    def empty(cls, num_rows: int, num_pieces: int, value_dim: int, device: torch.device) -> Partials:
        """Return room for results."""
        num = num_rows * num_pieces
        return cls(
            torch.empty(num, value_dim, dtype=torch.float32, device=device),
            torch.empty(num, dtype=torch.float32, device=device),
            num_pieces,
        )


def launch_shape(num_rows: list[int], num_kv_heads: int, row_bytes: int, num_programs: int) -> LaunchShape:
    """Choose tile sizes and how often to cut contexts.

    `num_rows`: for each sequence, queries times heads per KV head; `row_bytes`: bytes of one key.
    `num_programs` is how many programs keep the device busy. A tile of keys must fit in shared memory, so
    long keys make it short.
    """
    is_wide = row_bytes >= 512
    block_m = max(_MIN_DIM, min(64 if is_wide else 128, _next_power_of_2(max(num_rows))))
    block_n = 64 if not is_wide else 32 if row_bytes <= 1152 else 16
    num_tiles = sum(-(-rows // block_m) for rows in num_rows)
    wanted = num_programs // max(1, num_tiles * num_kv_heads)
    num_splits = min(_MAX_SPLITS, _next_power_of_2(wanted)) if wanted > 1 else 1
    return LaunchShape(block_m, block_n, num_splits, 8 if block_m >= 64 else 4, 1 if is_wide else 2)


class TritonAttentionStep:
    """`StepContext` over the Triton kernels."""

    def __init__(
        self, tensors: StepTensors, kv: DeviceKV, *, batch: ForwardBatch | None, num_multiprocessors: int
    ) -> None:
        """`batch` is needed if a latent layer may get too many queries to be absorbed."""
        self._tensors = tensors
        self._kv = kv
        self._batch = batch
        self._num_programs = num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
        self._launches: dict[tuple[int, int, int, int], list[TileLaunch]] = {}
        self._torch_steps: dict[int, AttentionStep] = {}

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the KV of the new tokens, then attend; see `StepContext.attend`."""
        layer = self._kv.layer(call.layer_idx)
        cache_k = layer[:, 0, :, :, : key.shape[-1]]
        self._write(key, cache_k)
        latent = call.latent
        if latent is None:
            cache_v = layer[:, 1, :, :, : value.shape[-1]]
            self._write(value, cache_v)
            output = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
            self._read(call, query, (cache_k, cache_v), output, max(self._tensors.num_queries))
            return output
        limit = latent.max_absorbed_queries
        caches = cache_k, cache_k[..., : latent.rank]
        if max(self._tensors.num_queries) <= limit:
            return latent.project(self._weigh_latents(call, latent.absorb(query), caches, limit))
        assert self._batch is not None, "long chunks need the batch"
        if min(self._tensors.num_queries) <= limit:
            weighted = self._weigh_latents(call, latent.absorb(query), caches, limit)
            output = latent.project(weighted).contiguous()
        else:
            output = query.new_empty(query.shape[0], query.shape[1], latent.value_dim)
        rest = self._torch_steps.get(limit)
        if rest is None:
            rest = self._torch_steps[limit] = AttentionStep(self._batch, self._kv, longer_than=limit)
        rest.read(call, query, (KVRows(self._kv, call.layer_idx, 0, key.shape[-1]), None), output)
        return output

    def _weigh_latents(
        self, call: AttentionCall, query: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], limit: int
    ) -> torch.Tensor:
        """q [T, H, rank + rope] -> weighted latents [T, H, rank]; zeros for sequences over the limit."""
        output = query.new_zeros(query.shape[0], query.shape[1], caches[1].shape[-1])
        self._read(call, query, caches, output, limit)
        return output

    def _write(self, source: torch.Tensor, cache: torch.Tensor) -> None:
        num_tokens, num_heads, dim = source.shape
        if source.stride(2) != 1:
            source = source.contiguous()
        kernel: Any = write_kernel[(num_tokens,)]
        kernel(
            source,
            cache,
            self._tensors.slots,
            source.stride(0),
            source.stride(1),
            cache.stride(0),
            cache.stride(1),
            cache.stride(2),
            NUM_HEADS=num_heads,
            HEAD_DIM=dim,
            BLOCK_SIZE=cache.shape[1],
            PADDED=_next_power_of_2(num_heads * dim),
        )

    def _read(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        limit: int,
    ) -> None:
        """Fill the rows of `output` [T, H, Dv] of sequences with up to `limit` queries."""
        if query.stride(2) != 1:
            query = query.contiguous()
        num_kv_heads = caches[0].shape[2]
        group = query.shape[1] // num_kv_heads
        row_bytes = query.shape[2] * query.element_size()
        key = limit, num_kv_heads, group, row_bytes
        launches = self._launches.get(key)
        if launches is None:
            launches = self._launches[key] = self._plan(*key)
        for launch in launches:
            self._attend(call, launch, query, caches, output)

    def _plan(self, limit: int, num_kv_heads: int, group: int, row_bytes: int) -> list[TileLaunch]:
        """Cut sequences with up to `limit` queries into tiles: few queries in one launch, more in another."""
        lengths = self._tensors.num_queries
        short = [seq for seq, n in enumerate(lengths) if n <= min(limit, SHORT_QUERIES)]
        long = [seq for seq, n in enumerate(lengths) if SHORT_QUERIES < n <= limit]
        launches: list[TileLaunch] = []
        for members in (short, long):
            if not members:
                continue
            num_rows = [lengths[seq] * group for seq in members]
            shape = launch_shape(num_rows, num_kv_heads, row_bytes, self._num_programs)
            counts = [-(-rows // shape.block_m) for rows in num_rows]
            tiles = np.empty((sum(counts), 2), dtype=np.int32)
            tiles[:, 0] = np.repeat(members, counts)
            tiles[:, 1] = np.concatenate([np.arange(count) for count in counts])
            on_device = torch.from_numpy(tiles).to(self._kv.device, non_blocking=True)
            launches.append(TileLaunch(on_device, shape, members is short))
        return launches

    def _attend(
        self,
        call: AttentionCall,
        launch: TileLaunch,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
    ) -> None:
        shape, num_kv_heads = launch.shape, caches[0].shape[2]
        shared = self._tensors.shared if launch.has_decodes and call.sliding_window is None else None
        prefixes = None if shared is None else self._attend_prefixes(call, shared, query, caches)
        num_tiles, value_dim = launch.tiles.shape[0], caches[1].shape[3]
        partials = None
        if shape.num_splits > 1 or shared is not None:
            num_rows = num_tiles * num_kv_heads * shape.block_m
            partials = Partials.empty(num_rows, shape.num_splits, value_dim, query.device)
        self._run(call, shape, num_tiles, query, caches, output, partials, launch.tiles, shared)
        if partials is not None:
            self._reduce(launch, query.shape[1] // num_kv_heads, num_kv_heads, partials, prefixes, output)

    def _attend_prefixes(
        self,
        call: AttentionCall,
        shared: SharedTensors,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
    ) -> Partials:
        """Attend the members of all groups to what they share; results are by member, KV head and row."""
        num_kv_heads = caches[0].shape[2]
        group = query.shape[1] // num_kv_heads
        num_rows = shared.max_members * group
        row_bytes = query.shape[2] * query.element_size()
        shape = launch_shape([num_rows], num_kv_heads, row_bytes, self._num_programs)
        num_tiles = shared.num_groups * -(-num_rows // shape.block_m)
        num_members = len(shared.members) - 1
        partials = Partials.empty(
            num_members * query.shape[1], shape.num_splits, caches[1].shape[3], query.device
        )
        self._run(call, shape, num_tiles, query, caches, query, partials, None, shared)
        return partials

    def _run(
        self,
        call: AttentionCall,
        shape: LaunchShape,
        num_tiles: int,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        partials: Partials | None,
        tiles: torch.Tensor | None,
        shared: SharedTensors | None,
    ) -> None:
        """Launch `attend_kernel`: without `tiles` over the shared prefixes, else over sequences."""
        keys, values = caches
        tensors = self._tensors
        head_dim, value_dim, num_kv_heads = query.shape[2], values.shape[3], keys.shape[2]
        main, rest = split_dim(head_dim)
        padded_values = max(_MIN_DIM, _next_power_of_2(value_dim))
        group = query.shape[1] // num_kv_heads
        unused = tensors.query_starts
        kernel: Any = attend_kernel[(num_tiles, num_kv_heads, shape.num_splits)]
        kernel(
            query,
            keys,
            values,
            output,
            output if partials is None else partials.sums,
            output if partials is None else partials.weights,
            unused if tiles is None else tiles,
            tensors.query_starts,
            tensors.context_lens,
            tensors.block_tables,
            unused if shared is None else shared.first_keys,
            unused if shared is None else shared.members,
            unused if shared is None else shared.member_starts,
            unused if shared is None else shared.num_keys,
            1 if shared is None else -(-shared.max_members * group // shape.block_m),
            call.scaling if call.softcap else call.scaling * _LOG2_E,
            call.softcap or 1.0,
            call.sliding_window or 0,
            query.stride(0),
            query.stride(1),
            output.stride(0),
            output.stride(1),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            values.stride(0),
            values.stride(1),
            values.stride(2),
            tensors.block_tables.stride(0),
            GROUP=group,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            BLOCK_SIZE=keys.shape[1],
            MAIN=main,
            REST=rest,
            VALUES=padded_values,
            BLOCK_M=shape.block_m,
            BLOCK_N=shape.block_n,
            NUM_SPLITS=shape.num_splits,
            HAS_WINDOW=call.sliding_window is not None,
            HAS_SOFTCAP=call.softcap is not None,
            VALUES_ARE_KEYS=call.latent is not None and value_dim == main == padded_values,
            WIDEN=query.device.type == "cpu",
            IS_PREFIX=tiles is None,
            IS_SUFFIX=tiles is not None and shared is not None,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    def _reduce(
        self,
        launch: TileLaunch,
        group: int,
        num_kv_heads: int,
        partials: Partials,
        prefixes: Partials | None,
        output: torch.Tensor,
    ) -> None:
        """Join the pieces of each row, and those of its shared prefix."""
        tensors, value_dim = self._tensors, output.shape[2]
        member_of = tensors.shared.member_of if tensors.shared is not None else tensors.query_starts
        others = partials if prefixes is None else prefixes
        reduce: Any = reduce_kernel[(launch.tiles.shape[0], num_kv_heads, launch.shape.block_m)]
        reduce(
            partials.sums,
            partials.weights,
            others.sums,
            others.weights,
            member_of,
            output,
            launch.tiles,
            tensors.query_starts,
            output.stride(0),
            output.stride(1),
            GROUP=group,
            VALUE_DIM=value_dim,
            VALUES=max(_MIN_DIM, _next_power_of_2(value_dim)),
            BLOCK_M=launch.shape.block_m,
            NUM_SPLITS=launch.shape.num_splits,
            NUM_SHARED=0 if prefixes is None else prefixes.num_pieces,
        )


def split_dim(head_dim: int) -> tuple[int, int]:
    """Return a power of 2 and a padded rest (0: none) that cover `head_dim`; at least 16 each."""
    main = max(_MIN_DIM, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - main
    return main, max(_MIN_DIM, _next_power_of_2(rest)) if rest > 0 else 0


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1
