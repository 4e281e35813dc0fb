"""Rotary angles as transformers' modules of the Llama pattern compute them, without importing those.

Tests compare logits of both, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

_SCALED = frozenset({"linear", "llama3", "yarn", "dynamic", "longrope"})
"""Rotary embeddings whose angles transformers computes once. Those of the last two change where a context
grows beyond the training length, at which `context_limit` ends it."""


class RotaryAngles:
    """Cosines and sines of positions, in transformers' order: both halves of a head have the same angles."""

    def __init__(self, config: Any, head_dim: int, layer_type: str | None = None) -> None:
        """Take a config that `has_fixed_angles`; `layer_type`: where it has angles for each."""
        parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        self._scaling = 1.0
        if parameters["rope_type"] == "default":
            num_dims = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
            exponents = torch.arange(0, num_dims, 2, dtype=torch.float) / num_dims
            self._frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
            kind = {} if layer_type is None else {"layer_type": layer_type}
            self._frequencies, self._scaling = compute(config, torch.device("cpu"), **kind)

    @property
    def num_dims(self) -> int:
        """Dims of a head that have an angle."""
        return 2 * len(self._frequencies)

    def __call__(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of `positions` [1, T] as [1, T, head_dim] each, in the dtype of `like`."""
        half = positions[..., None].float() * self._frequencies
        angles = torch.cat((half, half), dim=-1)
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return cos.to(like.dtype), sin.to(like.dtype)


def has_fixed_angles(config: Any, *, may_be_partial: bool = False) -> bool:
    """Whether angles depend on positions alone, and every dim of a head has one unless it may lack one."""
    rope = config.rope_parameters
    if not isinstance(rope, dict) or rope.get("rope_type") not in {"default", *_SCALED}:
        return False
    # The native step reads an angle for every dim of a head: fewer would be read beyond their end.
    return may_be_partial or rope.get("partial_rotary_factor") in (None, 1, 1.0)
