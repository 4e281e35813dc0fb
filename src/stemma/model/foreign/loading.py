"""From a checkpoint to a model of transformers that holds exactly the checkpoint's weights.

Foreign code runs here, some of it from the checkpoint: any exception of it becomes a ModelError.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError, UnsupportedModel
from stemma.foreign_code import ForeignCode
from stemma.model.attend.attention import SUPPORTED
from stemma.model.families.registry import stacked_experts
from stemma.model.files.directory import INDEX, lacks_metadata
from stemma.model.files.extent import check_extent
from stemma.model.files.llama_config import as_transformers
from stemma.model.files.progress import Progress
from stemma.model.foreign.fit import check_shapes, check_surplus
from stemma.model.foreign.reports import transformers_reports
from stemma.model.foreign.weights import ModuleWeights
from stemma.model.opened.checkpoint import DecoderParts, read_plain
from stemma.model.opened.checkpoint_config import SCORE_WEIGHT, is_classifier, runs_remote_code


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part of a model."""

    weights: dict[str, torch.Tensor]
    class_of: Callable[[Any], Any]
    """Takes the model's class; returns one that is built with room for these weights."""


def load_modules(
    settings: ModelSettings,
    checkpoint: DecoderParts,
    device: torch.device,
    report: Progress,
    cut: RankPart | None = None,
) -> tuple[Any, ModuleWeights]:
    """Return the model of transformers on `device` with all weights of the file, and where its codes are.

    Quantized weights are dequantized in it. With `cut` it holds this part, and no more is read. Raises
    ModelError, UnsupportedModel.
    """
    path, config, method = checkpoint.path, checkpoint.config, checkpoint.method
    advice = "; compare config.json with the one the checkpoint was published with"
    if method is not None and checkpoint.quantized is None:
        advice = f"; its weights are quantized ({method}): install what transformers needs for that, or take "
        advice += "the unquantized checkpoint"
    with ForeignCode(f"can't load {path}", advice), transformers_reports(report):
        config = as_transformers(config)
        if not runs_remote_code(settings):
            check_extent(path, config, checkpoint.stored)
        model, loaded = _load(settings, checkpoint, config, cut)
    if is_classifier(config):
        loaded["unexpected_keys"] = set(loaded["unexpected_keys"]) - {SCORE_WEIGHT}
    check_shapes(path, model, loaded)
    check_surplus(path, model, loaded, checkpoint.stored, quantized=method is not None)
    unexpected = loaded["unexpected_keys"]
    codes = {name: code for name, code in checkpoint.codes.items() if name not in unexpected}
    weights = ModuleWeights(model, codes)
    with ForeignCode(f"can't run {type(model).__name__}"):
        if not model._can_set_attn_implementation():
            raise UnsupportedModel(f"{type(model).__name__} has no attention interface. {SUPPORTED}")
        if device.type != "cpu" and cut is None:
            group_experts(model)
        return model.to(device).eval().requires_grad_(False), weights


def group_experts(model: Any) -> None:
    """Compute the experts of a mixture, if it is one, in one grouped product.

    One after the other, as on CPU, each would wait for the device, and no step could be recorded.
    """
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")


def model_class(config: Any) -> Any:
    """Return the class of transformers for a config of its own."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def loading_options(dtype: torch.dtype) -> dict[str, Any]:
    """Return what `from_pretrained` is called with."""
    return {
        "dtype": dtype,
        "attn_implementation": "eager",
        "experts_implementation": "eager",  # one expert after the other: rows don't depend on each other
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are reported, and refused in our words
    }


def _load(
    settings: ModelSettings, checkpoint: DecoderParts, config: Any, cut: RankPart | None
) -> tuple[Any, dict[str, Any]]:
    """Return the model, and what transformers says of its tensors."""
    path, dtype = checkpoint.path, checkpoint.dtype
    if checkpoint.quantized is not None:
        weights = stacked_experts(config, checkpoint.quantized.dequantized(dtype))
        return _from_tensors(config, weights, dtype)
    if cut is not None:
        return _from_tensors(config, cut.weights, dtype, cut.class_of)
    if checkpoint.tower:
        return _from_tensors(config, read_plain(checkpoint.stored), dtype)
    if lacks_metadata(path):
        if checkpoint.method is not None or runs_remote_code(settings):
            raise ModelError(f'{path / INDEX} has no "metadata"; add "metadata": {{}}, or download it again')
        return _from_tensors(config, read_plain(checkpoint.stored), dtype)
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model, loaded = auto.from_pretrained(
        str(path),
        config=config,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=settings.trust_remote_code,
        **loading_options(dtype),
    )
    return model, loaded


def _from_tensors(
    config: Any,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    class_of: Callable[[Any], Any] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Return the model of transformers with these weights, and what fitted."""
    plain = copy.deepcopy(config)
    for field in ("quantization_config", "compression_config"):
        if hasattr(plain, field):
            delattr(plain, field)
    named = model_class(config)
    built_as = named if class_of is None else class_of(named)
    model, loaded = built_as.from_pretrained(None, config=plain, state_dict=weights, **loading_options(dtype))
    model.__class__ = named
    # Some quantizers write zeros for the biases that a model doesn't have.
    loaded["unexpected_keys"] = {
        name
        for name in loaded["unexpected_keys"]
        if not (name.endswith(".bias") and name in weights and not bool(weights[name].any()))
    }
    return model, loaded
