"""The attention function that transformers calls in every layer, and what it refuses.

After `use_paged_attention` a model hands its rotated q, k and v of a flat batch [1, T] to
`paged_attention`; the step's context travels as the keyword `STEP_KEYWORD` of the model call. Two contexts
exist: `AttentionStep` (model/attend/paged.py) attends over the blocks; `AttentionProbe` runs once at load and
records what each layer passes, so that a model we would serve wrongly is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stemma.errors import UnsupportedModel
from stemma.model.attend.attention import SUPPORTED, AttentionCall, StepContext
from stemma.model.attend.selection import Selection
from stemma.model.opened.checkpoint_config import attention_chunks

ATTENTION = "stemma_paged"
STEP_KEYWORD = "stemma_step"
POSITIONS_KEYWORD = "stemma_positions"
"""[T] int64: for what a layer makes of positions behind its rotation."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    selection: Selection | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' interface demands: q [1, H, T, D], k and v [1, Hk, T, D] -> [1, T, H, Dv].

    `s_aux` [H] are attention sinks; `selection` comes from layers of `foreign/sparse.py` alone. Raises
    UnsupportedModel if the model doesn't forward our keyword or brings its own mask or bias.
    """
    step: StepContext | None = kwargs.get(STEP_KEYWORD)
    if step is None:
        raise UnsupportedModel(f"{type(module).__name__} doesn't pass keywords on to attention. {SUPPORTED}")
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedModel(f"{type(module).__name__} needs its own mask or bias. {SUPPORTED}")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModel(
            f"{type(module).__name__} isn't causal: its tokens see those after them, so no prefix can be "
            f"reused. {SUPPORTED}"
        )
    call = AttentionCall(
        layer_idx=getattr(module, "stemma_layer", module.layer_idx),  # type: ignore[arg-type]
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window=sliding_window,
        softcap=softcap,
        latent=getattr(module, "stemma_latent", None),
        first_key=getattr(module, "stemma_first_key", 0),
        sinks=None if s_aux is None else s_aux.detach().float(),
        rotates=bool(getattr(module, "use_rope", True)),
        selection=selection,
        chunk=getattr(module, "stemma_chunk", None),
    )
    if (temperature := getattr(module, "stemma_temperature", None)) is not None:
        query = temperature.scaled(query, kwargs[POSITIONS_KEYWORD])
    output = step.attend(call, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return output.unsqueeze(0), None


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries that grow with their position, in layers without rotation (https://arxiv.org/abs/2501.19399)."""

    floor: float
    """Positions that share a factor."""
    scale: float

    def scaled(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return q [1, H, T, D] of tokens at `positions` [T], each times its factor."""
        factors = torch.log1p(torch.floor((positions.float() + 1.0) / self.floor)) * self.scale + 1.0
        return (query * factors[:, None]).to(query.dtype)


class AttentionProbe:
    """Records the attention calls of one forward pass; its output is zeros of the right shape."""

    def __init__(self, after_layer: Callable[[], None] | None = None) -> None:
        self._after_layer = after_layer
        self.calls: list[tuple[AttentionCall, int, int, int]] = []
        """Call, number of KV heads, key dim, value dim."""

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Record the call; see `StepContext.attend`."""
        self.calls.append((call, key.shape[1], key.shape[2], value.shape[2]))
        if self._after_layer is not None:
            self._after_layer()
        value_dim = value.shape[2] if call.latent is None else call.latent.value_dim
        return query.new_zeros(query.shape[0], query.shape[1], value_dim)


def use_paged_attention(hf_model: Any) -> None:
    """Make a model of transformers call `paged_attention` in every layer."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, paged_attention)
    hf_model.set_attn_implementation(ATTENTION)
    chunks = attention_chunks(hf_model.config.get_text_config())
    for module in hf_model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            # transformers counts a step's rows here, which belong to several sequences and begin anywhere.
            module.stemma_temperature = Temperature(module.floor_scale, module.attn_scale)
            module.attn_temperature_tuning = False
        if (chunk := chunks.get(getattr(module, "layer_idx", None))) is not None:
            module.stemma_chunk = chunk  # transformers tells it by a mask alone
