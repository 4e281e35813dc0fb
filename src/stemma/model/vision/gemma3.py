"""Gemma 3: one square of each image, whose tokens see each other both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from stemma.errors import UnsupportedModel
from stemma.model.vision.family import Expansion, Pixels, TokenText, VisionFamily, pixels_for

_TEXT = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)")
_HEAD = "lm_head.weight"
_TOWER = ("vision_tower.", "multi_modal_projector.")
_OLD = "vision_tower.vision_model."
"""Of files written before transformers 5."""


class _Modules(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        from transformers import AutoModel
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        super().__init__()
        auto: Any = AutoModel
        make: Any = Gemma3MultiModalProjector
        self.vision_tower = auto.from_config(config.vision_config)
        self.multi_modal_projector = make(config)


class _Tower:
    """Encoder and projector."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        vision = config.vision_config
        per_side, wanted = vision.image_size // vision.patch_size, config.mm_tokens_per_image
        side = int(wanted**0.5)
        if side * side != wanted or side < 1 or per_side % side:
            raise UnsupportedModel(
                f"{per_side} x {per_side} patches of an image don't make {wanted}: mm_tokens_per_image"
            )
        self.modules: torch.nn.Module = _Modules(config).to(dtype).eval()

    def encode(self, pixels: Pixels) -> torch.Tensor:
        """See `Tower.encode`."""
        found = self.modules.vision_tower(pixel_values=pixels_for(self.modules, pixels, "pixel_values"))  # type: ignore[operator]
        vectors: torch.Tensor = self.modules.multi_modal_projector(found.last_hidden_state)  # type: ignore[operator]
        return vectors


def _text_name(name: str) -> str | None:
    if _TEXT.match(name):
        return _TEXT.sub("model.", name)
    return _HEAD if name in (_HEAD, f"language_model.{_HEAD}") else None


def _tower_name(name: str) -> str | None:
    name = name.removeprefix("model.")
    if name.startswith(_OLD):
        name = "vision_tower." + name.removeprefix(_OLD)
    return name if name.startswith(_TOWER) else None


def _expand(config: Any, _pixels: Pixels, token_text: TokenText) -> Expansion:
    num_tokens = int(config.mm_tokens_per_image)
    opening, closing = token_text(config.boi_token_index), token_text(config.eoi_token_index)
    return Expansion(
        f"\n\n{opening}{token_text(config.image_token_index) * num_tokens}{closing}\n\n", num_tokens
    )


def _check_processor(settings: Mapping[str, Any]) -> None:
    if settings.get("do_pan_and_scan"):
        raise UnsupportedModel(
            "preprocessor_config.json asks for pan and scan (do_pan_and_scan), which cuts an image into "
            "several; it isn't served: set it to false"
        )


GEMMA3 = VisionFamily(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    _text_name,
    _tower_name,
    _Tower,
    _expand,
    {},
    num_leading=1,
    shown_as=lambda config: int(config.boi_token_index),
    num_whole=lambda config: int(config.mm_tokens_per_image),
    check_processor=_check_processor,
)
