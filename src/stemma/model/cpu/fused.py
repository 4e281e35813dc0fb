"""Decoders as one native call a step on CPU, of the families that the registry says are fused.

Run through its modules, a layer of transformers takes some fifty torch calls, which at batch 1 cost as much
as a fifth of a 0.5B model's weights. Here torch looks up embeddings and rotary angles, and everything else is
one call (decoder_step.py). Which classes follow the pattern is a list of names; tests hold each against plain
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from stemma.memory.device.kv import DeviceKV
from stemma.model.attention import AttentionCall, StepContext
from stemma.model.batch import ForwardBatch
from stemma.model.cpu.attention import NativeAttentionStep
from stemma.model.cpu.decoder_step import DecoderStep
from stemma.model.cpu.experts import has_common_form
from stemma.model.cpu.fused_layer import FusedLayer, can_route, fuse, joined_linears
from stemma.model.cpu.heads import GroupedHeads, Heads, LatentHeads
from stemma.model.cpu.latent import can_pack_latent
from stemma.model.cpu.linears import leave_file
from stemma.model.cpu.low_rank import PackedAdapter, adaptable
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weights import PackedProduct, can_pack
from stemma.model.families.pattern import MAX_HEAD_DIM
from stemma.model.families.registry import FUSED_LAYERS
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.quantization.attach import plain_weight

EmbeddingFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""ids [T] -> [T, H]."""


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
    if not all(type(layer).__name__ in FUSED_LAYERS for layer in layers):
        return False
    linears = [m for m in hf_model.modules() if hasattr(m, "in_features") and hasattr(m, "weight")]
    if not all(type(linear) is nn.Linear for linear in linears):
        return False  # a quantizer's: its weight isn't what it multiplies with
    if not all(can_pack(linear.weight) for linear in linears):
        return False
    return bool(
        all(_follows_gated(layer.mlp) and _follows_heads(layer.self_attn) for layer in layers)
        and hasattr(base, "embed_tokens")
        and hasattr(base, "rotary_emb")
        and getattr(base.config, "hidden_act", None) == "silu"
    )


def _follows_heads(attention: Any) -> bool:
    latent = getattr(attention, "stemma_latent", None)
    if latent is None:
        return bool(attention.head_dim % 2 == 0 and attention.head_dim <= MAX_HEAD_DIM)
    has_bias = {linear.bias is not None for linear in joined_linears(attention).values()}
    return (
        can_pack_latent(latent)
        and latent.rope_dim % 2 == 0
        and latent.rank + latent.rope_dim <= MAX_HEAD_DIM
        and len(has_bias) == 1
    )


def _follows_gated(mlp: Any) -> bool:
    if all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
        return True
    router: Any = getattr(mlp, "gate", None)
    return has_common_form(getattr(mlp, "experts", None)) and can_route(router) and can_pack(router.weight)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """All weights of a model but the last norm's, as the decoder reads them."""

    layers: list[FusedLayer]
    embed: EmbeddingFunction
    head: PackedProduct
    saved_bytes: int
    """Memory that they take less than plain ones."""


def pack_weights(hf_model: Any, packing: Packing, report: Callable[[float], None]) -> PackedWeights:
    """Take the weights out of a model that `follows_pattern`."""
    base = hf_model.model
    layers: list[FusedLayer] = []
    for index in range(len(base.layers)):
        report(index / len(base.layers))
        layers.append(fuse(base.layers[index], packing))
        base.layers[index] = torch.nn.Identity()  # lets the plain weights go
    embed, head = _join_ends(hf_model, packing)
    return PackedWeights(layers, embed, head, packing.saved_bytes)


class FusedDecoder:
    """Runs all layers of a model over paged KV. Building it takes the weights out of the model."""

    def __init__(
        self,
        hf_model: Any,
        calls: Sequence[AttentionCall],
        packing: Packing,
        report: Callable[[float], None],
        packed: PackedWeights | None = None,
    ) -> None:
        """Take the weights of `hf_model`; `calls` are the attention calls of its layers in the probe.

        `packed`: these weights, where they are packed already.
        """
        base = hf_model.model
        self._kernels = kernels = packing.kernels
        is_latent = hasattr(base.layers[0].self_attn, "stemma_latent")
        self._heads: Heads = LatentHeads(hf_model) if is_latent else GroupedHeads(hf_model)
        if packed is None:
            packed = pack_weights(hf_model, packing, report)
        else:
            packing.saved_bytes += packed.saved_bytes
            base.layers = hf_model.lm_head = base.embed_tokens = nn.Identity()
        leave_file(hf_model)
        layers, self._embed, self._head = packed.layers, packed.embed, packed.head
        for layer, call in zip(layers, calls, strict=True):
            layer.attend_by(call)
        eps = float(base.norm.variance_epsilon)
        self._step = DecoderStep(kernels, layers, base.norm.weight, self._head, eps)
        self._num_layers, self._dtype = len(layers), base.norm.weight.dtype
        self._adaptable = adaptable(layers)

    def adaptable(self) -> dict[str, LinearShape]:
        """See `Decoder.adaptable`."""
        return self._adaptable

    def prepare_adapter(self, adapter: Adapter) -> PackedAdapter:
        """See `Decoder.prepare_adapter`."""
        return PackedAdapter(self._kernels, adapter, self._num_layers, self._dtype)

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        """Write the batch's KV and return the logits of its `logits_rows`, [L, vocab] float32."""
        with NativeAttentionStep(batch, kv, self._kernels) as step:
            return self._run(batch, step)

    def run_with_states(self, batch: ForwardBatch, step: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """See `MainDecoder.run_with_states`."""
        assert isinstance(step, NativeAttentionStep)
        states = torch.empty(len(batch.token_ids), self._head.in_features, dtype=self._dtype)
        return self._run(batch, step, states), states

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [T, H] of ids [T]."""
        return self._embed(token_ids)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [T, vocab] of hidden states [T, H] behind the final norm."""
        return self._head(states)

    def _run(
        self, batch: ForwardBatch, step: NativeAttentionStep, states: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self._embed(batch.token_ids)
        heads, attend = self._heads.of_step(batch, step.kv)
        plan = step.plan(self._heads.num_kv_heads, self._heads.group_size).open(self._kernels)
        return self._step.forward(batch, step.kv, hidden, heads, attend, plan, states)


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
    return partial(torch.index_select, plain_weight(embedding).clone(), 0), packed
