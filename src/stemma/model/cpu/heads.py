"""How a fused decoder's layers see a token: heads with keys and values, or one latent for all heads.

What a step's call needs to know of either kind (`RotateArgs` or `LatentArgs`, beside `AttendArgs`) is put
together here; what all steps over the same cache share is made once.
"""

from __future__ import annotations

from typing import Protocol
from weakref import ref

import torch

from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import WindowGroup
from stemma.model.attend.batch import ForwardBatch
from stemma.model.attend.kept_kv import KVShape
from stemma.model.cpu.attention import native_format
from stemma.model.cpu.recurrent_layer import state_layout_of
from stemma.model.cpu.rotary import PositionAngles, RotaryHalves
from stemma.model.families import layout
from stemma.native.structures import AttendArgs, LatentArgs, RotateArgs


class Heads(Protocol):
    """One of the two kinds."""

    num_kv_heads: int
    group_size: int
    """Query heads on each KV head."""

    def of_step(self, batch: ForwardBatch, kv: DeviceKV) -> tuple[RotateArgs | LatentArgs, AttendArgs]:
        """Return the arguments of a step, those of layer 0; valid until the next call."""


class FusedGroupedHeads:
    """Heads of queries, on fewer heads of keys and values."""

    def __init__(
        self,
        heads: layout.GroupedHeads,
        eps: float,
        dtype: torch.dtype,
        angles: layout.Angles,
        local_angles: layout.Angles | None = None,
    ) -> None:
        """`eps`: of the norms of queries and keys, where the layers have any."""
        self._dtype, self._eps, self._dim = dtype, eps, heads.head_dim
        self._num_heads, self.num_kv_heads = heads.num_heads, heads.num_kv_heads
        self._rotary_dim = heads.rotary_dim or heads.head_dim
        self.group_size = self._num_heads // self.num_kv_heads
        self._angles = PositionAngles(angles, dtype)
        self._local_angles = None if local_angles is None else PositionAngles(local_angles, dtype)
        self._axes = heads.axes
        self._made: tuple[ref[DeviceKV], RotateArgs, AttendArgs] | None = None
        self._step: tuple[torch.Tensor, ...] = ()

    def of_step(self, batch: ForwardBatch, kv: DeviceKV) -> tuple[RotateArgs, AttendArgs]:
        """Return the arguments of rotation and attention for a step."""
        if self._made is None or self._made[0]() is not kv:
            self._made = ref(kv), self._rotate_args(kv), self._attend_args(kv)
        _, rotate, attend = self._made
        reach = max(batch.context_lens)
        if batch.axes is None:
            cos, sin = self._angles.at(batch.positions, reach)
        else:
            cos, sin = self._angles.at_axes(batch.axes, self._axes, reach)
        self._step = cos, sin  # the structure points there
        rotate.cos, rotate.sin = cos.data_ptr(), sin.data_ptr()
        if self._local_angles is not None:
            local_cos, local_sin = self._local_angles.at(batch.positions, reach)
            self._step = (*self._step, local_cos, local_sin)
            rotate.local_cos, rotate.local_sin = local_cos.data_ptr(), local_sin.data_ptr()
        rotate.slots, rotate.tokens = batch.slots.data_ptr(), len(batch.slots)
        rotate.threads = torch.get_num_threads()
        return rotate, attend

    def _rotate_args(self, kv: DeviceKV) -> RotateArgs:
        """Return them without what a step brings; the cache's addresses are those of layer 0."""
        return RotateArgs(
            keys=kv.address(0, 0),
            values=kv.address(0, 1),
            block_stride=kv.block_stride,
            token_stride=kv.token_stride,
            head_stride=self._dim,
            heads=self._num_heads,
            kv_heads=self.num_kv_heads,
            dim=self._dim,
            rotary_dim=self._rotary_dim,
            block_size=kv.layout.block_size,
            is_bf16=self._dtype == torch.bfloat16,
            eps=self._eps,
            format=native_format(kv.layout),
        )

    def _attend_args(self, kv: DeviceKV) -> AttendArgs:
        return AttendArgs(
            query_token_stride=self._num_heads * self._dim,
            query_head_stride=self._dim,
            block_stride=kv.block_stride,
            token_stride=kv.token_stride,
            head_stride=self._dim,
            key_dim=self._dim,
            value_dim=self._dim,
            is_bf16=self._dtype == torch.bfloat16,
            format=native_format(kv.layout),
        )


class FusedLatentHeads:
    """All heads over one latent and one rotary key (model/attend/latent.py)."""

    num_kv_heads = 1

    def __init__(self, heads: layout.LatentHeads, angles: layout.Angles, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.group_size = heads.num_heads
        self._dims = {
            "heads": heads.num_heads,
            "rank": heads.rank,
            "nope": heads.nope_dim,
            "rope": heads.rope_dim,
            "value": heads.value_dim,
            "rotation": heads.rotation,
        }
        self._angles = RotaryHalves(angles, dtype)
        self._made: tuple[ref[DeviceKV], LatentArgs, AttendArgs] | None = None
        self._step: tuple[torch.Tensor, ...] = ()

    def of_step(self, batch: ForwardBatch, kv: DeviceKV) -> tuple[LatentArgs, AttendArgs]:
        """Return the arguments of rotation and attention for a step."""
        if self._made is None or self._made[0]() is not kv:
            self._made = ref(kv), *self._args(kv)
        _, latent, attend = self._made
        cos, sin = self._angles.at(batch.positions, max(batch.context_lens))
        slots = batch.slots
        if (written := batch.written_rows) is not None:
            slots = torch.full_like(batch.slots, -1)
            slots[written] = batch.slots[written]
        self._step = cos, sin, slots  # the structure points there
        latent.cos, latent.sin, latent.slots = (tensor.data_ptr() for tensor in self._step)
        return latent, attend

    def _args(self, kv: DeviceKV) -> tuple[LatentArgs, AttendArgs]:
        """Return them without what a step brings; the cache's addresses are those of layer 0."""
        width = self._dims["rank"] + self._dims["rope"]
        latent = LatentArgs(
            latents=kv.address(0, 0),
            block_stride=kv.block_stride,
            token_stride=kv.token_stride,
            block_size=kv.layout.block_size,
            format=native_format(kv.layout),
            **self._dims,
        )
        attend = AttendArgs(
            query_token_stride=self.group_size * width,
            query_head_stride=width,
            block_stride=kv.block_stride,
            token_stride=kv.token_stride,
            head_stride=kv.layout.head_dim,
            key_dim=width,
            value_dim=self._dims["rank"],
            is_bf16=self._dtype == torch.bfloat16,
            format=native_format(kv.layout),
        )
        return latent, attend


def kv_shape_of(model: layout.ModelLayout) -> KVShape:
    """Return what the layers keep for a token."""
    heads = model.heads
    windows = [layer.window for layer in model.layers if layer.recurrent is None]
    if isinstance(heads, layout.LatentHeads):
        return KVShape(len(windows), 1, 1, heads.rank + heads.rope_dim, heads.rank)
    shape = heads.num_kv_heads, heads.head_dim
    group = WindowGroup.of([(window, None) for window in windows], [shape] * len(windows))
    return KVShape(len(windows), 2, *shape, state=state_layout_of(model), windows=group)


def heads_of(model: layout.ModelLayout, dtype: torch.dtype) -> Heads:
    """Return what a model's steps need to know of its heads."""
    if isinstance(model.heads, layout.LatentHeads):
        return FusedLatentHeads(model.heads, model.angles(), dtype)
    local = None if model.local_angles is None else model.local_angles()
    return FusedGroupedHeads(model.heads, model.norm.eps, dtype, model.angles(), local)
