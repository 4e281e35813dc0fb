"""A rank's model: transformers' modules with smaller weights, read slice by slice from the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError, UnsupportedModel
from stemma.model.families.cuts import Cuts
from stemma.model.files.directory import is_gguf, open_safetensors, stored_tensors
from stemma.model.formats.reading import find_format
from stemma.model.opened.checkpoint_abilities import needs_hidden
from stemma.model.opened.checkpoint_config import quantization_of, runs_remote_code
from stemma.model.parallel.share import Cut, Share, check_groups, check_share, cut_of
from stemma.model.weights.rounding import round_to_nearest


def check_cut(settings: ModelSettings, config: Any, share: Share) -> Cuts:
    """Return how a checkpoint is cut for several ranks. Raises UnsupportedModel or ConfigError."""
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
    cuts = check_share(architecture, config.get_text_config(), share)
    if settings.quantize in ("int8", "int4"):
        how = round_to_nearest(8 if settings.quantize == "int8" else 4, settings.quantize_group_size)
        check_groups(architecture, config.get_text_config(), share, cuts, how.group_size)
    return cuts


def read_share(path: Path, share: Share, cuts: Cuts, num_experts: int) -> dict[str, torch.Tensor]:
    """Return a rank's part of all tensors; of those that are cut, only its part is read.

    Raises ModelError if a tensor can't be divided.
    """
    weights: dict[str, torch.Tensor] = {}
    files: dict[Path, Any] = {}
    for tensor in stored_tensors(path):
        cut = cut_of(tensor.name, tensor.shape, share, cuts, num_experts)
        if cut is None:
            continue
        if tensor.file not in files:
            files[tensor.file] = open_safetensors(tensor.file)
        file = files[tensor.file]
        if not cut.parts:
            whole = file.get_tensor(tensor.stored_name)
            weights[cut.name] = torch.zeros_like(whole) if cut.is_zero else whole
            continue
        if not _is_divided(tensor.name, tensor.shape, cut, share, cuts):
            raise ModelError(
                f"{path}: {tensor.name} {list(tensor.shape)} can't be cut for {share.size} ranks"
            )
        weights[cut.name] = _read(file.get_slice(tensor.stored_name), tensor.shape, cut).contiguous()
    return weights


def _is_divided(name: str, shape: tuple[int, ...], cut: Cut, share: Share, cuts: Cuts) -> bool:
    """Whether a tensor has the runs that its family says, and each is divided without a rest."""
    runs = cuts.runs(name.removesuffix(".weight").removesuffix(".bias"))
    of_one = [sum(len(part) for part in parts) for parts in cut.parts.values()]
    if not all(of_one):
        return False
    if runs:
        axis = max(cut.parts)
        return sum(run.length for run in runs) == shape[axis]
    return all(shape[axis] % num == 0 for (axis, _), num in zip(cut.parts.items(), of_one, strict=True))


def _read(stored: Any, shape: tuple[int, ...], cut: Cut, before: tuple[slice, ...] = ()) -> torch.Tensor:
    """Return a rank's part of a tensor, read run by run."""
    axis = len(before)
    if axis == len(shape):
        part: torch.Tensor = stored[before]
        return part
    runs = [
        _read(stored, shape, cut, (*before, slice(part.start, part.stop)))
        for part in cut.parts.get(axis, (range(shape[axis]),))
    ]
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim=axis)


def cut_class(model_class: Any, share: Share, cuts: Cuts) -> Any:
    """Return a subclass of a transformers model that is built with this rank's smaller weights."""

    class CutModel(model_class):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            _cut(self, share, cuts)

    # transformers looks a class up by its name and its module's file.
    CutModel.__name__, CutModel.__qualname__ = model_class.__name__, model_class.__qualname__
    CutModel.__module__ = model_class.__module__
    return CutModel


def _cut(model: nn.Module, share: Share, cuts: Cuts) -> None:
    """Make the parameters smaller; they hold nothing yet."""
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for path, module in modules:
        leaf = path.rpartition(".")[2]
        for name, runs in cuts.fields.get(leaf, {}).items():
            if hasattr(module, name):
                setattr(module, name, share.held(runs))
        if leaf == "experts" and hasattr(module, "down_proj"):
            _cut_experts(module, share)
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = cut_of(f"{path}.{name}", tuple(parameter.shape), share, cuts, 0)
            if cut is not None and cut.parts:
                setattr(module, name, _empty(parameter, *cut.shape(tuple(parameter.shape))))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def cut_buffers(model: nn.Module, share: Share, cuts: Cuts) -> None:
    """Leave of what the modules computed as they were made what belongs to this rank's part."""
    for path, module in list(model.named_modules()):
        for name, buffer in list(module.named_buffers(recurse=False)):
            runs = cuts.buffer_runs(f"{path}.{name}")
            if runs is None:
                continue
            axis = cuts.axis(f"{path}.{name}")
            own = [at for part in share.parts(buffer.shape[axis], runs) for at in part]
            setattr(module, name, buffer.index_select(axis, torch.tensor(own, device=buffer.device)))


def _cut_experts(module: Any, share: Share) -> None:
    count, hidden, inner = module.down_proj.shape
    module.num_experts = len(share.experts(count))
    module.intermediate_dim = len(share.part(inner, of_expert=True))
    expands = "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"
    whole = getattr(module, expands)
    width = whole.shape[1] // inner * module.intermediate_dim
    setattr(module, expands, _empty(whole, module.num_experts, width, whole.shape[2]))
    module.down_proj = _empty(module.down_proj, module.num_experts, hidden, module.intermediate_dim)


def _empty(like: torch.Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(like.new_empty(shape), requires_grad=like.requires_grad)
