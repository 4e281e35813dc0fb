"""SmolVLM: tiles of an image and the whole of it, each some placeholders, before a Llama."""

from __future__ import annotations

import copy
from typing import Any

import torch

from stemma.model.vision.family import Expansion, Pixels, TokenText, VisionFamily, pixels_for

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_TEXT = "model.text_model."


class _Tower:
    """Encoder and connector."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMModel

        config = copy.deepcopy(config)
        text = config.text_config  # the connector's output is as wide as its hidden states; nothing else is
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
        make: Any = SmolVLMModel
        self._model = make(config)
        self._model.to(dtype).eval()
        del self._model.text_model
        self.modules: torch.nn.Module = self._model

    def encode(self, pixels: Pixels) -> torch.Tensor:
        """See `Tower.encode`."""
        found: list[torch.Tensor] = self._model.get_image_features(
            *(pixels_for(self._model, pixels, name) for name in ("pixel_values", "pixel_attention_mask"))
        ).pooler_output
        return torch.cat(found)[None]


def _text_name(name: str) -> str | None:
    if name.startswith(_TEXT):
        return f"model.{name.removeprefix(_TEXT)}"
    return name if name == "lm_head.weight" else None


def _tower_name(name: str) -> str | None:
    is_of_tower = name.startswith(("model.vision_model.", "model.connector."))
    return name.removeprefix("model.") if is_of_tower else None


def _expand(config: Any, pixels: Pixels, token_text: TokenText) -> Expansion:
    vision = config.vision_config
    num_each = int((vision.image_size // vision.patch_size) ** 2 / config.scale_factor**2)
    one = token_text(config.image_token_id) * num_each
    [[num_rows]], [[num_columns]] = pixels["rows"].tolist(), pixels["cols"].tolist()
    whole = f"{_AROUND}{_WHOLE}{one}{_AROUND}"
    if not (num_rows or num_columns):
        return Expansion(whole, num_each)
    lines = [
        "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{one}" for column in range(num_columns)) + "\n"
        for row in range(num_rows)
    ]
    return Expansion("".join(lines) + "\n" + whole, num_each * (num_rows * num_columns + 1))


SMOLVLM = VisionFamily(
    "smolvlm",
    "SmolVLMForConditionalGeneration",
    _text_name,
    _tower_name,
    _Tower,
    _expand,
    {"return_row_col_info": True},
    num_leading=2,
)
