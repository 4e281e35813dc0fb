"""Decoder layers of the Llama pattern (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE) as few calls a layer on CPU.

Run through its modules, a layer of transformers takes some fifty torch calls, which at batch 1 cost as much
as a fifth of a 0.5B model's weights. Here the same computation is four matrix products (query, key and value
in one, gate and up in one) and five kernel calls, or, in bf16 where the processor multiplies it, one call for
the whole step (decoder_step.py). Which classes follow the pattern is a list of names; tests hold each against
plain transformers. A mixture of experts keeps its module, and goes call by call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stemma.memory.device.kv import DeviceKV
from stemma.model.attention import AttentionCall
from stemma.model.batch import ForwardBatch
from stemma.model.cpu.attention import ALL_QUERIES, NativeAttentionStep
from stemma.model.cpu.decoder_step import PackedEmbedding, make_decoder_step
from stemma.model.cpu.fused_layer import FusedLayer, fuse
from stemma.model.cpu.weights import LinearFunction, PackedProduct, leave_file, linear_function
from stemma.native.library import AttendArgs, GateArgs, Kernels, NormArgs, RotateArgs

LAYER_CLASSES = frozenset(
    {
        "LlamaDecoderLayer",
        "MistralDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "Qwen3MoeDecoderLayer",
    }
)
MAX_HEAD_DIM = 1024
"""What the rotary kernel has room for."""
MLP_ROWS = 256
"""Tokens that go through the gated layers at a time: their activations stay in the processor's cache, and
malloc hands out the same pages again instead of mapping (and zeroing) fresh ones for every layer."""


def follows_pattern(hf_model: Any) -> bool:
    """Whether `FusedDecoder` computes what this model's own modules do.

    Model, base and layers must be transformers' own: the decoder skips their forwards, and a checkpoint's own
    code may do more in one.
    """
    base: Any = getattr(hf_model, "model", None)
    layers = list(getattr(base, "layers", []))
    if not layers or not all(
        type(part).__module__.startswith("transformers.models.") for part in (hf_model, base, *layers)
    ):
        return False
    if not all(type(layer).__name__ in LAYER_CLASSES for layer in layers):
        return False
    linears = [m for m in hf_model.modules() if hasattr(m, "in_features") and hasattr(m, "weight")]
    if not all(type(linear) is nn.Linear for linear in linears):
        return False  # a quantizer's: its weight isn't what it multiplies with
    attention = layers[0].self_attn
    return bool(
        hasattr(base, "embed_tokens")
        and hasattr(base, "rotary_emb")
        and attention.head_dim % 2 == 0
        and attention.head_dim <= MAX_HEAD_DIM
        and getattr(base.config, "hidden_act", None) == "silu"
    )


class FusedDecoder:
    """Runs all layers of a model over paged KV. Takes the model's linear layers apart as it is built."""

    def __init__(
        self,
        hf_model: Any,
        calls: Sequence[AttentionCall],
        kernels: Kernels,
        *,
        pack: bool,
        report: Callable[[float], None],
    ) -> None:
        """Take over `hf_model`; `calls` are what its layers passed to attention in the probe."""
        base = hf_model.model
        attention = base.layers[0].self_attn
        self._kernels = kernels
        self._rotary = base.rotary_emb
        self._eps = float(base.norm.variance_epsilon)
        self._head_dim = int(attention.head_dim)
        self._num_heads = int(base.config.num_attention_heads)
        self._num_kv_heads = int(base.config.num_key_value_heads)
        self._layers: list[FusedLayer] = []
        for index in range(len(base.layers)):
            report(index / len(base.layers))
            self._layers.append(fuse(base.layers[index], calls[index], pack))
            base.layers[index] = torch.nn.Identity()  # lets the plain weights go
        leave_file(hf_model)
        self._vocab_size: int = hf_model.lm_head.weight.shape[0]
        self._embed, self._head = _join_ends(hf_model, kernels, pack)
        self._final_norm: torch.Tensor = base.norm.weight
        self._step = make_decoder_step(kernels, self._layers, self._final_norm, self._head, self._eps)

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the batch's KV and return the logits of its `logits_rows`, [L, vocab]."""
        with NativeAttentionStep(batch, kv, self._kernels, ALL_QUERIES) as step:
            return self._forward(batch, kv, step)

    def _forward(self, batch: ForwardBatch, kv: DeviceKV, step: NativeAttentionStep) -> torch.Tensor:
        kernels = self._kernels
        hidden = self._embed(batch.token_ids)
        cos, sin = self._rotary(hidden[None], batch.positions[None])
        cos, sin = cos.contiguous(), sin.contiguous()
        rotate = self._rotate_args(batch, kv, cos, sin)
        attend = self._attend_args(kv, hidden.dtype)
        plan = step.plan(ALL_QUERIES, self._num_kv_heads, self._num_heads // self._num_kv_heads).open(kernels)
        if self._step is not None and 0 < len(hidden) <= self._step.max_rows:
            return self._step.forward(batch, kv, hidden, rotate, attend, plan)
        normed = torch.empty_like(hidden)
        query = hidden.new_empty(hidden.shape[0], self._num_heads * self._head_dim)
        attended = torch.empty_like(query)
        rotate.query = attend.query = query.data_ptr()
        attend.output = attended.data_ptr()
        norm = self._norm_args(hidden, normed)
        norm_at, rotate_at, attend_at = (ctypes.addressof(args) for args in (norm, rotate, attend))
        keys_at, layer_bytes, part_bytes = _addresses(kv)
        delta: torch.Tensor | None = None
        for layer in self._layers:
            norm.delta = None if delta is None else delta.data_ptr()
            norm.weight = layer.input_norm.data_ptr()
            kernels.add_rms_norm(norm_at)
            qkv = layer.qkv(normed)
            rotate.qkv = qkv.data_ptr()
            rotate.q_norm = None if layer.q_norm is None else layer.q_norm.data_ptr()
            rotate.k_norm = None if layer.k_norm is None else layer.k_norm.data_ptr()
            rotate.keys = attend.keys = keys_at
            rotate.values = attend.values = keys_at + part_bytes
            keys_at += layer_bytes
            kernels.rotate_and_write(rotate_at)
            attend.window, attend.scale = layer.sliding_window, layer.scaling
            kernels.attend(plan, attend_at)
            if layer is self._layers[-1]:  # what follows serves logits alone: no other row needs it
                if len(batch.logits_rows) == 0:
                    return hidden.new_empty(0, self._vocab_size)
                hidden, attended = hidden[batch.logits_rows], attended[batch.logits_rows]
                normed = torch.empty_like(hidden)
                norm = self._norm_args(hidden, normed)
                norm_at = ctypes.addressof(norm)
            delta = layer.output(attended)
            norm.delta = delta.data_ptr()
            norm.weight = layer.post_norm.data_ptr()
            kernels.add_rms_norm(norm_at)
            delta = self._run_mlp(layer, normed)
        assert delta is not None
        return self._logits(hidden, delta)

    def _run_mlp(self, layer: FusedLayer, normed: torch.Tensor) -> torch.Tensor:
        if layer.gate_up is None or layer.down is None:
            assert layer.mlp is not None
            output = layer.mlp(normed[None])
            first: torch.Tensor = output[0] if isinstance(output, tuple) else output
            return first.reshape(normed.shape)
        rows = normed.shape[0]
        if rows <= MLP_ROWS * 3 // 2:
            return self._run_gated(layer.gate_up, layer.down, normed)
        output = torch.empty_like(normed)
        start = 0
        while start < rows:
            end = rows if rows - start <= MLP_ROWS * 3 // 2 else start + MLP_ROWS
            output[start:end] = self._run_gated(layer.gate_up, layer.down, normed[start:end])
            start = end
        return output

    def _run_gated(self, gate_up: LinearFunction, down: LinearFunction, x: torch.Tensor) -> torch.Tensor:
        both = gate_up(x)
        rows, width = both.shape
        activated = both.new_empty(rows, width // 2)
        args = GateArgs(
            both.data_ptr(),
            activated.data_ptr(),
            rows,
            width // 2,
            x.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        self._kernels.silu_and_multiply(ctypes.addressof(args))
        return down(activated)

    def _logits(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(hidden)
        norm = self._norm_args(hidden, normed)
        norm.delta, norm.weight = delta.data_ptr(), self._final_norm.data_ptr()
        self._kernels.add_rms_norm(ctypes.addressof(norm))
        return self._head(normed)

    def _norm_args(self, residual: torch.Tensor, output: torch.Tensor) -> NormArgs:
        rows, dim = residual.shape
        threads = torch.get_num_threads()
        is_bf16 = residual.dtype == torch.bfloat16
        return NormArgs(
            None, residual.data_ptr(), None, output.data_ptr(), rows, dim, is_bf16, threads, self._eps
        )

    def _rotate_args(
        self, batch: ForwardBatch, kv: DeviceKV, cos: torch.Tensor, sin: torch.Tensor
    ) -> RotateArgs:
        """Return what all layers share; the cache's addresses are those of layer 0."""
        keys, _, part_bytes = _addresses(kv)
        return RotateArgs(
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            keys=keys,
            values=keys + part_bytes,
            slots=batch.slots.data_ptr(),
            tokens=len(batch.slots),
            block_stride=kv.data.stride(0),
            token_stride=kv.data.stride(3),
            head_stride=kv.data.stride(4),
            heads=self._num_heads,
            kv_heads=self._num_kv_heads,
            dim=self._head_dim,
            block_size=kv.layout.block_size,
            is_bf16=cos.dtype == torch.bfloat16,
            threads=torch.get_num_threads(),
            eps=self._eps,
        )

    def _attend_args(self, kv: DeviceKV, dtype: torch.dtype) -> AttendArgs:
        return AttendArgs(
            query_token_stride=self._num_heads * self._head_dim,
            query_head_stride=self._head_dim,
            block_stride=kv.data.stride(0),
            token_stride=kv.data.stride(3),
            head_stride=kv.data.stride(4),
            key_dim=self._head_dim,
            value_dim=self._head_dim,
            is_bf16=dtype == torch.bfloat16,
        )


def _addresses(kv: DeviceKV) -> tuple[int, int, int]:
    """Return the address of layer 0 in block 0, and the bytes to the next layer and to the values."""
    size = kv.data.element_size()
    return kv.data.data_ptr(), kv.data.stride(1) * size, kv.data.stride(2) * size


def _join_ends(hf_model: Any, kernels: Kernels, pack: bool) -> tuple[LinearFunction, LinearFunction]:
    """Return the embedding, ids [T] -> [T, H], and the output head; take both out of the model.

    Where they are tied, the one packed weight serves both if rows can be read out of it.
    """
    embedding, head = hf_model.model.embed_tokens, hf_model.lm_head
    weight, bias = head.weight.detach(), head.bias
    tied = head.weight is embedding.weight
    hf_model.model.embed_tokens = hf_model.lm_head = torch.nn.Identity()
    if tied and pack and kernels.has_bf16_dot:
        packed = PackedProduct(weight, bias)
        if packed.strips is not None:
            return PackedEmbedding(kernels, packed), packed
    lookup = partial(F.embedding, weight=embedding.weight.detach())
    return lookup, linear_function(weight, bias, pack=pack and not tied)
