"""Qwen2.5-VL: an image in its own proportions, one placeholder for some patches, positions on three axes."""

from __future__ import annotations

import re
from typing import Any

import torch

from stemma.model.vision.family import Expansion, Pixels, VisionFamily

_TOWER = re.compile(r"^(?:model\.)?visual\.")
_TEXT = re.compile(r"^model\.(?:language_model\.)?")
"""Of files written before and since transformers 4.52."""


class _Tower:
    """Encoder with its merger."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        make: Any = Qwen2_5_VisionTransformerPretrainedModel
        self._model = make(config.vision_config)
        self._model.to(dtype).eval()
        self.modules: torch.nn.Module = self._model

    def encode(self, pixels: Pixels) -> torch.Tensor:
        """See `Tower.encode`."""
        patches = torch.from_numpy(pixels["pixel_values"]).to(self._model.dtype)
        found: torch.Tensor = self._model(
            patches, grid_thw=torch.from_numpy(pixels["image_grid_thw"])
        ).pooler_output
        return found


def _text_name(name: str) -> str | None:
    if _TOWER.match(name):
        return None
    return _TEXT.sub("model.", name)


def _tower_name(name: str) -> str | None:
    return _TOWER.sub("", name) if _TOWER.match(name) else None


def _expand(config: Any, pixels: Pixels, placeholder: str) -> Expansion:
    [[_, height, width]] = pixels["image_grid_thw"].tolist()
    merged = config.vision_config.spatial_merge_size
    grid = height // merged, width // merged
    num_tokens = grid[0] * grid[1]
    return Expansion(placeholder * num_tokens, num_tokens, grid)


QWEN2_5_VL = VisionFamily(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    _text_name,
    _tower_name,
    _Tower,
    _expand,
    {},
    num_leading=1,
)
