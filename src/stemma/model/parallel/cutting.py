"""A rank's model: transformers' modules with smaller weights, read slice by slice from the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError, UnsupportedModel
from stemma.model.checkpoint_abilities import needs_hidden
from stemma.model.checkpoint_config import quantization_of, runs_remote_code
from stemma.model.directory import is_gguf, open_safetensors, stored_tensors
from stemma.model.formats.reading import find_format
from stemma.model.parallel.share import COLUMNS, ROWS, Share, check_groups, check_share, cut_of
from stemma.model.weights.rounding import round_to_nearest


def check_cut(settings: ModelSettings, config: Any, share: Share) -> None:
    """Raise UnsupportedModel or ConfigError for a checkpoint that can't be cut for several ranks."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    quantization = quantization_of(config)
    if quantization or find_format(settings.path, quantization) is not None:
        kind = "a GGUF file" if is_gguf(settings.path) else "quantized"
        raise UnsupportedModel(
            f"{settings.path} is {kind}: only plain safetensors are cut for several ranks; leave "
            "tensor_parallel_size and context_parallel_size 1, or take the unquantized checkpoint"
        )
    if runs_remote_code(settings):
        raise UnsupportedModel(f"{settings.path} brings its own code, which isn't cut for several ranks")
    if share.context_size > 1 and needs_hidden(settings, config):
        raise ConfigError(
            "context_parallel_size doesn't go with embeddings and heads of scores: no rank has all hidden "
            "states; take tensor_parallel_size"
        )
    architecture = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type))
    check_share(architecture, config.get_text_config(), share)
    if settings.quantize in ("int8", "int4"):
        how = round_to_nearest(8 if settings.quantize == "int8" else 4, settings.quantize_group_size)
        check_groups(architecture, config.get_text_config(), share, how.group_size)


def read_share(path: Path, share: Share, num_experts: int) -> dict[str, torch.Tensor]:
    """Return a rank's part of all tensors; of those that are cut, only its part is read.

    Raises ModelError if a tensor can't be divided.
    """
    weights: dict[str, torch.Tensor] = {}
    files: dict[Path, Any] = {}
    for tensor in stored_tensors(path):
        cut = cut_of(tensor.name, tensor.shape, share, num_experts)
        if cut is None:
            continue
        if tensor.file not in files:
            files[tensor.file] = open_safetensors(tensor.file)
        file = files[tensor.file]
        if cut.axis is None:
            whole = file.get_tensor(tensor.stored_name)
            weights[cut.name] = torch.zeros_like(whole) if cut.is_zero else whole
            continue
        if not len(cut.part) or tensor.shape[cut.axis] % len(cut.part):
            raise ModelError(
                f"{path}: {tensor.name} {list(tensor.shape)} can't be cut for {share.size} ranks"
            )
        rows = slice(cut.part.start, cut.part.stop)
        stored = file.get_slice(tensor.stored_name)
        weights[cut.name] = (stored[rows] if cut.axis == 0 else stored[:, rows]).contiguous()
    return weights


def cut_class(model_class: Any, share: Share) -> Any:
    """Return a subclass of a transformers model that is built with this rank's smaller weights."""

    class CutModel(model_class):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            _cut(self, share)

    # transformers looks a class up by its name and its module's file.
    CutModel.__name__, CutModel.__qualname__ = model_class.__name__, model_class.__qualname__
    CutModel.__module__ = model_class.__module__
    return CutModel


def _cut(model: nn.Module, share: Share) -> None:
    """Make the parameters smaller; they hold nothing yet."""
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for path, module in modules:
        leaf = path.rpartition(".")[2]
        if leaf == "experts":
            count, inner = module.down_proj.shape[0], module.down_proj.shape[2]
            module.num_experts = len(share.experts(count))
            module.intermediate_dim = len(share.part(inner, of_expert=True))
            hidden = module.down_proj.shape[1]
            module.gate_up_proj = _empty(
                module.gate_up_proj, module.num_experts, 2 * module.intermediate_dim, hidden
            )
            module.down_proj = _empty(module.down_proj, module.num_experts, hidden, module.intermediate_dim)
        elif isinstance(module, nn.Linear) and leaf in COLUMNS:
            module.out_features = len(share.part(module.out_features))
            module.weight = _empty(module.weight, module.out_features, module.in_features)
            if module.bias is not None:
                module.bias = _empty(module.bias, module.out_features)
        elif isinstance(module, nn.Linear) and leaf in ROWS:
            module.in_features = len(share.part(module.in_features))
            module.weight = _empty(module.weight, module.out_features, module.in_features)


def _empty(like: torch.Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(like.new_empty(shape), requires_grad=like.requires_grad)
