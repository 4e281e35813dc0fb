"""Decoders of the Llama pattern (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE) as one native call a step on CPU.

Run through its modules, a layer of transformers takes some fifty torch calls, which at batch 1 cost as much
as a fifth of a 0.5B model's weights. Here torch looks up embeddings and rotary angles, and everything else is
one call (decoder_step.py). Which classes follow the pattern is a list of names; tests hold each against plain
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn

from stemma.memory.device.kv import DeviceKV
from stemma.model.attention import AttentionCall
from stemma.model.batch import ForwardBatch
from stemma.model.cpu.attention import NativeAttentionStep, native_format
from stemma.model.cpu.decoder_step import DecoderStep
from stemma.model.cpu.experts import has_common_form
from stemma.model.cpu.fused_layer import FusedLayer, fuse
from stemma.model.cpu.linears import leave_file
from stemma.model.cpu.low_rank import PackedAdapter, adaptable
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.rotary import RotaryAngles
from stemma.model.cpu.weights import PackedProduct, can_pack
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.quantization.attach import plain_weight
from stemma.native.library import AttendArgs, RotateArgs

EmbeddingFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""ids [T] -> [T, H]."""
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
    if not all(can_pack(linear.weight) for linear in linears):
        return False
    attention = layers[0].self_attn
    return bool(
        all(_follows_gated(layer.mlp) for layer in layers)
        and hasattr(base, "embed_tokens")
        and hasattr(base, "rotary_emb")
        and attention.head_dim % 2 == 0
        and attention.head_dim <= MAX_HEAD_DIM
        and getattr(base.config, "hidden_act", None) == "silu"
    )


def _follows_gated(mlp: Any) -> bool:
    if all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
        return True
    router: Any = getattr(mlp, "gate", None)
    experts = getattr(mlp, "experts", None)
    return (
        has_common_form(experts)
        and all(hasattr(router, name) for name in ("weight", "top_k", "norm_topk_prob"))
        and getattr(router, "bias", None) is None
        and can_pack(router.weight)
    )


class FusedDecoder:
    """Runs all layers of a model over paged KV. Building it takes the weights out of the model."""

    def __init__(
        self,
        hf_model: Any,
        calls: Sequence[AttentionCall],
        packing: Packing,
        report: Callable[[float], None],
    ) -> None:
        """Take the weights of `hf_model`; `calls` are the attention calls of its layers in the probe."""
        base = hf_model.model
        attention = base.layers[0].self_attn
        self._kernels = kernels = packing.kernels
        self._angles = RotaryAngles(base.rotary_emb, base.norm.weight.dtype)
        self._eps = float(base.norm.variance_epsilon)
        self._head_dim = int(attention.head_dim)
        self._num_heads = int(base.config.num_attention_heads)
        self._num_kv_heads = int(base.config.num_key_value_heads)
        layers: list[FusedLayer] = []
        for index in range(len(base.layers)):
            report(index / len(base.layers))
            layers.append(fuse(base.layers[index], calls[index], packing))
            base.layers[index] = torch.nn.Identity()  # lets the plain weights go
        self._embed, head = _join_ends(hf_model, packing)
        leave_file(hf_model)
        self._step = DecoderStep(kernels, layers, base.norm.weight, head, self._eps)
        self._num_layers, self._dtype = len(layers), base.norm.weight.dtype
        self._args: tuple[ref[DeviceKV], RotateArgs, AttendArgs] | None = None
        self._adaptable = adaptable(layers, self._num_heads, self._num_kv_heads, self._head_dim)

    def adaptable(self) -> dict[str, LinearShape]:
        """See `Decoder.adaptable`."""
        return self._adaptable

    def prepare_adapter(self, adapter: Adapter) -> PackedAdapter:
        """See `Decoder.prepare_adapter`."""
        return PackedAdapter(self._kernels, adapter, self._num_layers, self._dtype)

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the batch's KV and return the logits of its `logits_rows`, [L, vocab] float32."""
        with NativeAttentionStep(batch, kv, self._kernels) as step:
            return self._forward(batch, kv, step)

    def _forward(self, batch: ForwardBatch, kv: DeviceKV, step: NativeAttentionStep) -> torch.Tensor:
        kernels = self._kernels
        hidden = self._embed(batch.token_ids)
        cos, sin = self._angles.at(batch.positions, max(batch.context_lens))
        rotate, attend = self._args_over(kv)
        rotate.cos, rotate.sin = cos.data_ptr(), sin.data_ptr()
        rotate.slots, rotate.tokens = batch.slots.data_ptr(), len(batch.slots)
        rotate.threads = torch.get_num_threads()
        plan = step.plan(self._num_kv_heads, self._num_heads // self._num_kv_heads).open(kernels)
        return self._step.forward(batch, kv, hidden, rotate, attend, plan)

    def _args_over(self, kv: DeviceKV) -> tuple[RotateArgs, AttendArgs]:
        """Return what all layers and steps over `kv` share: made again only where `kv` is another one."""
        if self._args is None or self._args[0]() is not kv:
            self._args = ref(kv), self._rotate_args(kv), self._attend_args(kv)
        return self._args[1:]

    def _rotate_args(self, kv: DeviceKV) -> RotateArgs:
        """Return them without what a step brings; the cache's addresses are those of layer 0."""
        return RotateArgs(
            keys=kv.address(0, 0),
            values=kv.address(0, 1),
            block_stride=kv.block_stride,
            token_stride=kv.token_stride,
            head_stride=self._head_dim,
            heads=self._num_heads,
            kv_heads=self._num_kv_heads,
            dim=self._head_dim,
            block_size=kv.layout.block_size,
            is_bf16=self._dtype == torch.bfloat16,
            eps=self._eps,
            format=native_format(kv.layout),
        )

    def _attend_args(self, kv: DeviceKV) -> AttendArgs:
        return AttendArgs(
            query_token_stride=self._num_heads * self._head_dim,
            query_head_stride=self._head_dim,
            block_stride=kv.block_stride,
            token_stride=kv.token_stride,
            head_stride=self._head_dim,
            key_dim=self._head_dim,
            value_dim=self._head_dim,
            is_bf16=self._dtype == torch.bfloat16,
            format=native_format(kv.layout),
        )


def _join_ends(hf_model: Any, packing: Packing) -> tuple[EmbeddingFunction, PackedProduct]:
    """Return the embedding, ids [T] -> [T, H], and the output head; take both out of the model.

    Where they are tied, the one packed weight serves both: rows are read out of it.
    """
    embedding, head = hf_model.model.embed_tokens, hf_model.lm_head
    hf_model.model.embed_tokens = hf_model.lm_head = nn.Identity()
    is_tied = head.weight is embedding.weight
    packed = packing.head(head, embedding if is_tied else None)
    if is_tied:
        return packed.take_rows, packed
    return partial(F.embedding, weight=plain_weight(embedding).clone()), packed
