"""Attention by a list in device memory: one recording of a step serves any batch of its size.

Decodes, chunks, prefix hits, drafts and mixtures of them are tiles of one list (`attention_list.py`), which a
fixed number of resident programs work off (`listed_kernels.py`). Contexts are cut at absolute multiples of
PIECE keys, and pieces are joined in ascending order. So a row's bits don't depend on the batch, on how a
prompt was cut into steps, or on what was cached.

Tiles have one shape for each size of keys, since another shape may sum in another order. Only on sm_90, for
16 bit keys of up to 256 bytes, they have 64 rows and 4 warps, or with many rows 128 and 8: both are the same
instructions of one warpgroup for each 64 rows, each with all keys of the tile. (On sm_80 the compiler divides
the keys of the smaller tile among its warps.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.attention import AttentionCall
from stemma.model.cuda.attention_list import ListShape
from stemma.model.cuda.coded_kv import rows_of, stored_constants
from stemma.model.cuda.listed_kernels import attend_listed, join_listed
from stemma.model.cuda.low_rank import AdapterStep
from stemma.model.cuda.step_inputs import MANY_ROWS, SEEN_AT, StepInputs
from stemma.model.cuda.triton_attention import split_dim
from stemma.model.cuda.triton_kernels import write_kernel

PIECE = 1024
"""Keys of a piece."""
MOST_BLOCK_M = 128
_PROGRAMS_PER_MULTIPROCESSOR = 2
_JOINED_HEADS = 4
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class TileShape:
    """How `attend_listed` is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_shape(
    row_bytes: int, *, is_large: bool, is_coded: bool = False, has_warpgroups: bool = True
) -> TileShape:
    """Return the tiles for keys of `row_bytes` bytes, once they are numbers."""
    if row_bytes > 512:
        return TileShape(32, 32 if row_bytes <= 1152 else 16, 8, 1 if is_coded else 2)
    if row_bytes > 256:
        return TileShape(64, 32, 8, 2)
    if is_large:
        return TileShape(128, 64, 8, 2)
    return TileShape(64, 64, 8 if is_coded and not has_warpgroups else 4, 2)


class PieceRoom:
    """Room for pieces of tiles that are cut; all steps and layers share it, since one runs at a time."""

    def __init__(self, num_multiprocessors: int, piece: int = PIECE, *, has_warpgroups: bool = False) -> None:
        """`piece`: a multiple of the keys of all tiles, or fewer; `has_warpgroups`: it is sm_90."""
        self.has_warpgroups = has_warpgroups
        self.num_programs = num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
        self.piece = piece
        self._rooms: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def on(cls, device: torch.device) -> PieceRoom:
        """Return the room of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, has_warpgroups=properties.major == 9)

    def of(self, shape: ListShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weighted values [n, Dv], and their highest scores and weights [n, 2], float32.

        n: for each place, then for each program and row of its tile.
        """
        key = shape.num_heads, shape.value_dim
        if key not in self._rooms:
            num_rows = shape.num_places + self.num_programs * MOST_BLOCK_M
            self._rooms[key] = (
                torch.empty(num_rows, shape.value_dim, dtype=torch.float32, device=device),
                torch.empty(num_rows, 2, dtype=torch.float32, device=device),
            )
        return self._rooms[key]


class ListedAttentionStep:
    """`StepContext` over the kernels that work off a list.

    `attend` writes plain KV and reads. A decoder that writes KV by a kernel of its own, into `slots`, calls
    `read`.
    """

    def __init__(
        self, inputs: StepInputs, kv: DeviceKV, room: PieceRoom, adapters: AdapterStep | None = None
    ) -> None:
        """Serve the step that `inputs` were filled with last, and if recorded all others of its size."""
        self._inputs, self.kv, self._room, self.adapters = inputs, kv, room, adapters
        self._num_rows = inputs.num_rows
        self.slots, self.states = inputs.slots, inputs.states
        """[T] int64: where each row's KV is written; negative: nowhere."""

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the KV of the new tokens, then attend; see `StepContext.attend`."""
        layer = self.kv.layer(call.layer_idx)
        self._write(key, layer[:, 0, :, :, : key.shape[-1]])
        if call.latent is not None:
            # Always absorbed: what is expanded for long chunks alone would have other bits.
            return call.latent.project(self.read(call, call.latent.absorb(query)))
        self._write(value, layer[:, 1, :, :, : value.shape[-1]])
        return self.read(call, query, value.shape[-1])

    def read(self, call: AttentionCall, query: torch.Tensor, value_dim: int | None = None) -> torch.Tensor:
        """Attend with q [T, H, D] to KV that is written; return [T, H, value dim].

        `value_dim`: None: that of the keys. For a layer of latents q is absorbed, [T, H, rank + rope], and
        the weighted latents are returned, [T, H, rank].
        """
        if query.stride(2) != 1:
            query = query.contiguous()
        layer = rows_of(self.kv, call.layer_idx)
        keys = layer[:, 0, :, :, : query.shape[2]]
        if call.latent is not None:
            values = keys[..., : call.latent.rank]
        else:
            values = layer[:, 1, :, :, : value_dim or query.shape[2]]
        output = query.new_empty(query.shape[0], query.shape[1], values.shape[3])
        self._read(call, query, keys, values, output)
        return output

    def _write(self, source: torch.Tensor, cache: torch.Tensor) -> None:
        num_tokens, num_heads, dim = source.shape
        if source.stride(2) != 1:
            source = source.contiguous()
        kernel: Any = write_kernel[(num_tokens,)]
        kernel(
            source,
            cache,
            self.slots,
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
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        num_heads, head_dim = query.shape[1:]
        value_dim, num_kv_heads = values.shape[3], keys.shape[2]
        has_warpgroups = self._room.has_warpgroups
        tile = tile_shape(
            head_dim * query.element_size(),
            is_large=self._num_rows >= MANY_ROWS and has_warpgroups and query.element_size() == 2,
            is_coded=self.kv.layout.stored != "plain",
            has_warpgroups=has_warpgroups,
        )
        shape = ListShape(num_heads, num_kv_heads, value_dim, tile.block_m, self._room.piece, call.sight)
        partial, partial_weight = self._room.of(shape, query.device)
        numbers, header_at = self._inputs.numbers, self._inputs.header_of(shape)
        sinks = partial if call.sinks is None else call.sinks
        main, rest = split_dim(head_dim)
        padded_values = max(16, _next_power_of_2(value_dim))
        attend: Any = attend_listed[(self._room.num_programs,)]
        attend(
            query,
            keys,
            values,
            output,
            partial,
            partial_weight,
            sinks,
            numbers,
            header_at,
            SEEN_AT,
            shape.num_places,
            call.scaling if call.softcap else call.scaling * _LOG2_E,
            call.softcap or 1.0,
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
            NUM_HEADS=num_heads,
            GROUP=num_heads // num_kv_heads,
            HEADS=shape.heads,
            UNITS=shape.units,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            BLOCK_SIZE=keys.shape[1],
            MAIN=main,
            REST=rest,
            VALUES=padded_values,
            PIECE=shape.piece,
            BLOCK_M=tile.block_m,
            BLOCK_N=min(tile.block_n, shape.piece),
            HAS_FIRSTS=not call.sight.is_whole,
            HAS_SOFTCAP=call.softcap is not None,
            HAS_SINKS=call.sinks is not None,
            VALUES_ARE_KEYS=call.latent is not None and value_dim == main == padded_values,
            WIDEN=query.device.type == "cpu",
            **stored_constants(self.kv.layout),
            RANK=self.kv.layout.latent_rank,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        join: Any = join_listed[(2 * self._room.num_programs,)]
        join(
            partial,
            partial_weight,
            output,
            sinks,
            numbers,
            header_at,
            output.stride(0),
            output.stride(1),
            NUM_HEADS=num_heads,
            UNIT=shape.heads,
            HEADS=_JOINED_HEADS,
            VALUE_DIM=value_dim,
            VALUES=padded_values,
            HAS_SINKS=call.sinks is not None,
        )


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1
