"""Qwen2.5-VL and Qwen3-VL: images in their own proportions, a placeholder for some patches, three axes."""

from __future__ import annotations

import re
from typing import Any

import torch

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.vision.family import Expansion, Pixels, TokenText, VisionFamily, pixels_for

_TOWER = re.compile(r"^(?:model\.)?visual\.")
_TEXT = re.compile(r"^model\.(?:language_model\.)?")
"""Of files written before and since transformers 4.52."""
_STACK = re.compile(r"\.experts\.(?:gate_up|down)_proj$")


class _Tower:
    """Encoder with its mergers."""

    def __init__(self, model: Any, config: Any, dtype: torch.dtype) -> None:
        wide, wanted = config.vision_config.out_hidden_size, config.text_config.hidden_size
        if wide != wanted:
            raise ModelError(
                f"the vision encoder's vectors have {wide} numbers, the language model's {wanted}"
            )
        self._model = model
        self._model.to(dtype).eval()
        self.modules: torch.nn.Module = self._model

    def encode(self, pixels: Pixels) -> torch.Tensor:
        """See `Tower.encode`."""
        patches = pixels_for(self._model, pixels, "pixel_values").to(self._model.dtype)
        found = self._model(patches, grid_thw=pixels_for(self._model, pixels, "image_grid_thw"))
        return torch.stack([found.pooler_output, *(getattr(found, "deepstack_features", None) or ())])


def _tower_of_qwen2_5(config: Any, dtype: torch.dtype) -> _Tower:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    make: Any = Qwen2_5_VisionTransformerPretrainedModel
    return _Tower(make(config.vision_config), config, dtype)


def _tower_of_qwen3(config: Any, dtype: torch.dtype) -> _Tower:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    return _tower_with_features(Qwen3VLVisionModel, config, dtype)


def _tower_of_qwen3_moe(config: Any, dtype: torch.dtype) -> _Tower:
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

    return _tower_with_features(Qwen3VLMoeVisionModel, config, dtype)


def _tower_with_features(make: Any, config: Any, dtype: torch.dtype) -> _Tower:
    num_features, num_layers = (
        len(config.vision_config.deepstack_visual_indexes),
        config.text_config.num_hidden_layers,
    )
    if num_features >= num_layers:
        raise UnsupportedModel(
            f"features of images are added behind {num_features} layers of {num_layers}; served are fewer"
        )
    return _Tower(make(config.vision_config), config, dtype)


def _text_name(name: str) -> str | None:
    if _TOWER.match(name):
        return None
    return _TEXT.sub("model.", name)


def _text_name_of_mixture(name: str) -> str | None:
    """Return the name; experts lie in tensors that have no ``weight`` behind their layer's name."""
    found = _text_name(name)
    return f"{found}.weight" if found is not None and _STACK.search(found) else found


def _tower_name(name: str) -> str | None:
    return _TOWER.sub("", name) if _TOWER.match(name) else None


def _expand(config: Any, pixels: Pixels, token_text: TokenText) -> Expansion:
    [[_, height, width]] = pixels["image_grid_thw"].tolist()
    merged = config.vision_config.spatial_merge_size
    grid = height // merged, width // merged
    num_tokens = grid[0] * grid[1]
    return Expansion(token_text(config.image_token_id) * num_tokens, num_tokens, grid)


QWEN2_5_VL = VisionFamily(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    _text_name,
    _tower_name,
    _tower_of_qwen2_5,
    _expand,
    {},
    num_leading=1,
)
QWEN3_VL = VisionFamily(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    _text_name,
    _tower_name,
    _tower_of_qwen3,
    _expand,
    {},
    num_leading=1,
)
QWEN3_VL_MOE = VisionFamily(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    _text_name_of_mixture,
    _tower_name,
    _tower_of_qwen3_moe,
    _expand,
    {},
    num_leading=1,
)
