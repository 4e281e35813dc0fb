"""Whether a checkpoint fits a model of transformers: all tensors have a place, and all places are filled.

transformers initializes missing weights and ignores surplus ones; either would be served as wrong text.
Exceptions are tensors on transformers' own ignore list for the architecture, and layers that the config
counts for multi-token prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stemma.errors import ModelError
from stemma.model.families.prediction import NUMBERED_LAYER, is_prediction
from stemma.model.files.directory import StoredTensor
from stemma.model.opened.checkpoint_config import STORED_DTYPES

_SCALES = re.compile(
    r"(scale|scale_inv|scales|scale_2|qweight|qzeros|zero_point|g_idx|weight_packed|weight_shape|absmax|SCB"
    r"|quant_map|quant_state\S*)$"
)


def check_shapes(path: Path, model: Any, loaded: dict[str, Any]) -> None:
    """Raise ModelError for weights of another shape than the model's, and for missing ones."""
    if loaded["mismatched_keys"]:
        name, in_file, in_model = sorted(loaded["mismatched_keys"])[0]
        raise ModelError(
            f"{path}: {len(loaded['mismatched_keys'])} weights have other shapes than config.json "
            f"says, e.g. {name}: {list(in_file)} in the file, {list(in_model)} by config.json; the two "
            "belong to different models"
        )
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} weights of {type(model).__name__}, "
            f"e.g. {', '.join(missing[:3])}; is the download complete?"
        )


def check_surplus(
    path: Path,
    model: Any,
    loaded: dict[str, Any],
    stored: list[StoredTensor],
    *,
    quantized: bool,
) -> None:
    """Refuse a file with tensors that the model has no place for, or with unscaled quantized weights."""
    config = model.config.get_text_config()
    unexpected = sorted(name for name in loaded["unexpected_keys"] if not is_prediction(name, config))
    codes = [] if quantized else sorted(_unscaled_weights(model, stored))
    if codes or (not quantized and any(_SCALES.search(name) for name in unexpected)):
        example = codes[0] if codes else next(name for name in unexpected if _SCALES.search(name))
        raise ModelError(
            f"{path} has quantized weights (e.g. {example}), but config.json has no "
            "quantization_config that says how to read them; take config.json from where the checkpoint "
            "comes from, or the unquantized checkpoint"
        )
    if unexpected:
        raise ModelError(
            f"{path} has {len(unexpected)} weights that {type(model).__name__} has no place for, "
            f"e.g. {', '.join(unexpected[:3])}: {_why_unexpected(unexpected, config)}"
        )


def _unscaled_weights(model: Any, stored: Iterable[StoredTensor]) -> Iterator[str]:
    """Return the names of integer or FP8 weights, which are meaningless without scales."""
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    for tensor in stored:
        is_code = tensor.dtype not in STORED_DTYPES and tensor.dtype != "BOOL"
        if is_code and tensor.name.endswith("weight") and not any(p.search(tensor.name) for p in ignored):
            yield tensor.name


def _why_unexpected(names: list[str], config: Any) -> str:
    layers = [int(match[1]) for match in map(NUMBERED_LAYER.search, names) if match]
    num_layers = int(config.num_hidden_layers)
    if layers and max(layers) >= num_layers:
        return (
            f"the file has a layer {max(layers)}, config.json says num_hidden_layers is {num_layers}; "
            "take config.json from where the checkpoint comes from"
        )
    if any("lora_" in name for name in names):
        return "they are a LoRA adapter's; merge it into the model (peft: merge_and_unload) and save it again"
    if all(name.endswith(".bias") for name in names):
        return (
            "biases that config.json switches off (attention_bias, mlp_bias or the like); take config.json "
            "from where the checkpoint comes from"
        )
    return "config.json and weights belong to different models, or this version of transformers is too old"
