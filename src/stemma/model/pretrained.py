"""From a checkpoint to a model that holds exactly the checkpoint's weights: transformers', or a `DenseModel`.

transformers initializes missing weights and ignores surplus ones; either would be served as wrong text. So
every tensor of the file must have a place in the model. Exceptions are tensors on transformers' own ignore
list for the architecture, and layers that the config counts for multi-token prediction. Foreign code runs
here, some of it from the checkpoint: any exception of it becomes a ModelError.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.utils import logging as hf_logging

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError, UnsupportedModel
from stemma.memory.device.kv import TORCH_DTYPES
from stemma.model.attention import SUPPORTED
from stemma.model.dense import DenseModel, is_dense
from stemma.model.directory import (
    CONFIG,
    INDEX,
    StoredTensor,
    has_file,
    is_gguf,
    lacks_metadata,
    read_json,
    stored_tensors,
)
from stemma.model.extent import check_counts, check_extent
from stemma.model.families.layout import ModelLayout
from stemma.model.families.registry import fitting_layout
from stemma.model.foreign import foreign_code
from stemma.model.formats.reading import find_format, read_quantized
from stemma.model.formats.summary import FormatCounts
from stemma.model.llama_config import as_transformers, read_llama_config
from stemma.model.parallel.cutting import cut_class, read_share
from stemma.model.parallel.share import Share, check_groups, check_share, num_experts_of
from stemma.model.quantization.attach import attach, plain_weights, spares_stay
from stemma.model.quantization.quantize import round_to_nearest
from stemma.model.quantization.stored import StoredWeights

Progress: TypeAlias = Callable[[str, float], None]
"""Called with the name of the current stage and the share of it that is done, 0..1."""

_GENERATION = "generation_config.json"
_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float32}
_NUMBERED_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_PREDICTION = re.compile(r"(?:^|\.)mtp(?:\.|_)")
_SCALES = re.compile(
    r"(scale|scale_inv|scales|scale_2|qweight|qzeros|zero_point|g_idx|weight_packed|weight_shape|absmax|SCB"
    r"|quant_map|quant_state\S*)$"
)


def runs_remote_code(settings: ModelSettings) -> bool:
    """Whether the model's code comes from the checkpoint."""
    if is_gguf(settings.path):
        return False
    auto_map = read_json(settings.path / CONFIG).get("auto_map")
    return settings.trust_remote_code and isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map


def load_config(settings: ModelSettings) -> Any:
    """Return the transformers config of a causal LM whose layers we serve; raise ModelError."""
    path = settings.path
    if is_gguf(path):
        return _load_gguf_config(settings)
    raw = read_json(path / CONFIG)
    foreign = bool(raw.get("auto_map")) and raw.get("model_type") not in _known_model_types()
    if foreign and not settings.trust_remote_code:
        raise ModelError(
            f"{path} brings its own Python code; if you trust it, allow it with trust_remote_code"
        )
    check_counts(path, raw)
    with foreign_code(
        f"transformers can't read {path / CONFIG}",
        "; compare it with the one the checkpoint was published with",
    ):
        config: Any = read_llama_config(path)
        if config is None:
            config = AutoConfig.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=settings.trust_remote_code
            )
        _check_architecture(settings, config)
    return config


def _load_gguf_config(settings: ModelSettings) -> Any:
    from stemma.model.formats.gguf.config import read_config
    from stemma.model.formats.gguf.header import read_header

    with foreign_code(f"transformers can't use the metadata of {settings.path}"):
        config = read_config(read_header(settings.path))
        _check_architecture(settings, config)
    return config


def load_generation(path: Path) -> dict[str, Any]:
    """Return the checkpoint's generation_config.json, empty without one; of GGUF, what the file says."""
    if is_gguf(path):
        from stemma.model.formats.gguf.header import read_header
        from stemma.model.formats.gguf.tokenizer import end_token_ids

        ids = end_token_ids(read_header(path))
        return {"eos_token_id": list(ids)} if ids else {}
    return read_json(path / _GENERATION) if has_file(path, _GENERATION) else {}


def _known_model_types() -> Container[object]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING


def _check_architecture(settings: ModelSettings, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = list(getattr(config, "architectures", None) or [])
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not remote and (causal is None or (architectures and causal not in architectures)):
        named = ", ".join(architectures) or config.model_type
        raise ModelError(f"{settings.path} holds {named}, which is no causal language model. {SUPPORTED}")
    if getattr(type(config), "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{causal or config.model_type} is the decoder of an encoder-decoder model and needs the "
            f"encoder's output. {SUPPORTED}"
        )
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or [])
    if layer_types - _SERVED_LAYER_TYPES:
        named = str((architectures or [config.model_type])[0])
        other = ", ".join(sorted(layer_types - _SERVED_LAYER_TYPES))
        raise UnsupportedModel(f"{named} has layers of type {other}. {SUPPORTED}")


def load_weights(
    settings: ModelSettings,
    config: Any,
    device: torch.device,
    report: Progress,
    spared: Collection[str] = (),
    share: Share | None = None,
    *,
    dense: bool = False,
) -> tuple[Any, FormatCounts]:
    """Return the model of transformers on `device`, with all weights of the file; raise ModelError.

    A model of a class that `spared` names has spares for quantized weights that are going to be packed. With
    a `share` it holds this part of the weights, and no more is read. With `dense` it is a `DenseModel` where
    the checkpoint fits one.

    Beside it stands what the file's weights were; nothing is counted where transformers reads them.
    """
    path = settings.path
    weights = StoredWeights({})
    counts = FormatCounts()
    stored = stored_tensors(path)
    quantization = quantization_of(config)
    format_name = find_format(path, quantization)
    method = format_name or _check_method(settings, quantization)
    if share is not None:
        check_cut(settings, config, share)
    dtype = _dtype(settings, config, stored)
    if format_name is not None and dtype == torch.float16 and settings.dtype == "auto":
        dtype = torch.bfloat16  # our products know no float16
    doing = f"can't load {path}"
    advice = "; compare config.json with the one the checkpoint was published with"
    if method is not None and format_name is None:
        advice = f"; its weights are quantized ({method}): install what transformers needs for that, or take "
        advice += "the unquantized checkpoint"
    report("loading weights", 0.0)
    with foreign_code(doing, advice), transformers_reports(report):
        dense = dense and share is None and method == format_name and not runs_remote_code(settings)
        if format_name is not None:
            weights, counts = _read(settings, config, format_name, quantization, dtype)
            spares = _class_name(config) in spared
            plain = plain_weights(weights, dtype, spares=spares)
            shapes = {name: tuple(tensor.shape) for name, tensor in plain.items()}
            layout = fitting_layout(config, dtype, shapes) if dense else None
            if layout is not None and is_dense(layout):
                model = DenseModel(config, plain, dtype, layout)
                attach(model, weights.deferred())
                return model, replace(counts, num_quantized=len(weights.deferred()))
        else:
            layout = None if runs_remote_code(settings) else _stored_layout(config, dtype, stored)
            if dense and layout is not None and is_dense(layout):
                return DenseModel(config, _read_plain(stored), dtype, layout), counts
        config = as_transformers(config)
        if layout is None and not runs_remote_code(settings):
            check_extent(path, config, stored)
        if format_name is not None:
            model, loaded = _from_tensors(config, plain, dtype)
        elif share is not None:
            own = read_share(path, share, num_experts_of(config.get_text_config()))
            model, loaded = _from_tensors(config, own, dtype, share)
        elif lacks_metadata(path):
            if method is not None or runs_remote_code(settings):
                raise ModelError(
                    f'{path / INDEX} has no "metadata"; add "metadata": {{}}, or download it again'
                )
            model, loaded = _from_tensors(config, _read_plain(stored), dtype)
        else:
            from transformers import AutoModelForCausalLM

            auto: Any = AutoModelForCausalLM
            model, loaded = auto.from_pretrained(
                str(path),
                config=config,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=settings.trust_remote_code,
                **_loading_options(dtype),
            )
    _check_shapes(settings, model, loaded)
    _check_surplus(settings, model, loaded, stored, quantized=method is not None)
    unexpected = loaded["unexpected_keys"]
    placed = {name: weight for name, weight in weights.deferred().items() if name not in unexpected}
    attach(model, placed)
    with foreign_code(f"can't run {type(model).__name__}"):
        if not model._can_set_attn_implementation():
            raise UnsupportedModel(f"{type(model).__name__} has no attention interface. {SUPPORTED}")
        return model.to(device).eval().requires_grad_(False), replace(counts, num_quantized=len(placed))


def _stored_layout(config: Any, dtype: torch.dtype, stored: list[StoredTensor]) -> ModelLayout | None:
    """Return the layout of a checkpoint of plain tensors, where they are just those that its config makes."""
    if not all(tensor.dtype in _STORED_DTYPES for tensor in stored):
        return None
    return fitting_layout(config, dtype, {tensor.name: tensor.shape for tensor in stored})


def _read_plain(stored: list[StoredTensor]) -> dict[str, torch.Tensor]:
    """Return all tensors of the files, which stay there until they are read."""
    files: dict[Path, Any] = {
        file: safe_open(file, framework="pt") for file in {tensor.file for tensor in stored}
    }
    return {tensor.name: files[tensor.file].get_tensor(tensor.name) for tensor in stored}


def _loading_options(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "attn_implementation": "eager",
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are reported, and refused in our words
    }


def _read(
    settings: ModelSettings, config: Any, format_name: str, quantization: dict[str, Any], dtype: torch.dtype
) -> tuple[StoredWeights, FormatCounts]:
    """Return the weights that a reader of ours finds, and what they were."""
    if runs_remote_code(settings):
        raise UnsupportedModel(
            f"{settings.path}: quantized weights ({format_name}) under the checkpoint's own code aren't "
            "served"
        )
    return read_quantized(settings.path, format_name, quantization, config, dtype)


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
    architecture = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type))
    check_share(architecture, config.get_text_config(), share)
    if settings.quantize in ("int8", "int4"):
        how = round_to_nearest(8 if settings.quantize == "int8" else 4, settings.quantize_group_size)
        check_groups(architecture, config.get_text_config(), share, how.group_size)


def _from_tensors(
    config: Any, weights: dict[str, torch.Tensor], dtype: torch.dtype, share: Share | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return the model of transformers with these weights, and what fitted."""
    plain = copy.deepcopy(config)
    for field in ("quantization_config", "compression_config"):
        if hasattr(plain, field):
            delattr(plain, field)
    model_class = _model_class(config)
    built_as = model_class if share is None else cut_class(model_class, share)
    with spares_stay():
        model, loaded = built_as.from_pretrained(
            None, config=plain, state_dict=weights, **_loading_options(dtype)
        )
    model.__class__ = model_class
    # Some quantizers write zeros for the biases that a model doesn't have.
    loaded["unexpected_keys"] = {
        name for name in loaded["unexpected_keys"] if not _is_zero_bias(weights, name)
    }
    return model, loaded


def _class_name(config: Any) -> str | None:
    """Return the name of the class of transformers for a config, without importing the class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return name


def _model_class(config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _is_zero_bias(weights: dict[str, torch.Tensor], name: str) -> bool:
    return name.endswith(".bias") and name in weights and not bool(weights[name].any())


def quantization_of(config: Any) -> dict[str, Any]:
    """Return what config.json says about quantized weights; empty: nothing."""
    given = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if given is None:
        return {}
    return dict(given if isinstance(given, dict) else given.to_dict())


def _check_method(settings: ModelSettings, quantization: dict[str, Any]) -> str | None:
    """Return the quantization's name, or None; raise ModelError if neither we nor transformers read it."""
    if not quantization:
        return None
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    method = quantization.get("quant_method")
    if quantization.get("load_in_8bit") or quantization.get("load_in_4bit"):
        return "bitsandbytes"
    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    if method not in known:
        raise ModelError(
            f"{settings.path} is quantized by {method!r}, which neither Stemma nor transformers reads; take "
            "the unquantized checkpoint, or one in FP8 (quant_method fp8)"
        )
    return str(method)


def _dtype(settings: ModelSettings, config: Any, stored: list[StoredTensor]) -> torch.dtype:
    """Return the requested dtype, else the config's, else that of most bytes in the file."""
    if settings.dtype != "auto":
        return TORCH_DTYPES[settings.dtype]
    if is_gguf(settings.path):
        matrices = {tensor.dtype for tensor in stored if len(tensor.shape) > 1}
        return torch.float32 if matrices == {"F32"} else torch.bfloat16
    for source in (config, config.get_text_config()):
        named = getattr(source, "dtype", None)
        if isinstance(named, torch.dtype) and named in TORCH_DTYPES.values():
            return named
    num_bytes: dict[torch.dtype, int] = {torch.bfloat16: 0}  # of FP8 alone, nothing below is stored
    for tensor in stored:
        if tensor.dtype in _STORED_DTYPES:
            dtype = _STORED_DTYPES[tensor.dtype]
            num_bytes[dtype] = num_bytes.get(dtype, 0) + tensor.num_bytes
    return max(num_bytes, key=lambda dtype: num_bytes[dtype])


def _check_shapes(settings: ModelSettings, model: Any, loaded: dict[str, Any]) -> None:
    if loaded["mismatched_keys"]:
        name, in_file, in_model = sorted(loaded["mismatched_keys"])[0]
        raise ModelError(
            f"{settings.path}: {len(loaded['mismatched_keys'])} weights have other shapes than config.json "
            f"says, e.g. {name}: {list(in_file)} in the file, {list(in_model)} by config.json; the two "
            "belong to different models"
        )
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise ModelError(
            f"{settings.path} lacks {len(missing)} weights of {type(model).__name__}, "
            f"e.g. {', '.join(missing[:3])}; is the download complete?"
        )


def _check_surplus(
    settings: ModelSettings,
    model: Any,
    loaded: dict[str, Any],
    stored: list[StoredTensor],
    *,
    quantized: bool,
) -> None:
    """Refuse a file with tensors that the model has no place for, or with unscaled quantized weights."""
    config = model.config.get_text_config()
    unexpected = sorted(name for name in loaded["unexpected_keys"] if not _is_prediction(name, config))
    codes = [] if quantized else sorted(_unscaled_weights(model, stored))
    if codes or (not quantized and any(_SCALES.search(name) for name in unexpected)):
        example = codes[0] if codes else next(name for name in unexpected if _SCALES.search(name))
        raise ModelError(
            f"{settings.path} has quantized weights (e.g. {example}), but config.json has no "
            "quantization_config that says how to read them; take config.json from where the checkpoint "
            "comes from, or the unquantized checkpoint"
        )
    if unexpected:
        raise ModelError(
            f"{settings.path} has {len(unexpected)} weights that {type(model).__name__} has no place for, "
            f"e.g. {', '.join(unexpected[:3])}: {_why_unexpected(unexpected, config)}"
        )


def _is_prediction(name: str, config: Any) -> bool:
    """Whether a weight belongs to layers for multi-token prediction, which the config counts apart."""
    num_predicting = max(
        int(getattr(config, field, None) or 0) for field in ("num_nextn_predict_layers", "num_mtp_layers")
    )
    layer = _NUMBERED_LAYER.search(name)
    if num_predicting and _PREDICTION.search(name):
        return True
    beyond = int(layer[1]) - int(config.num_hidden_layers) if layer else -1
    return 0 <= beyond < num_predicting


def _unscaled_weights(model: Any, stored: Iterable[StoredTensor]) -> Iterator[str]:
    """Return the names of integer or FP8 weights, which are meaningless without scales."""
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    for tensor in stored:
        is_code = tensor.dtype not in _STORED_DTYPES and tensor.dtype != "BOOL"
        if is_code and tensor.name.endswith("weight") and not any(p.search(tensor.name) for p in ignored):
            yield tensor.name


def _why_unexpected(names: list[str], config: Any) -> str:
    layers = [int(match[1]) for match in map(_NUMBERED_LAYER.search, names) if match]
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


@contextmanager
def transformers_reports(report: Progress) -> Iterator[None]:
    """Turn transformers' progress bar into calls of `report`; silence its load log."""
    silent: Any = hf_logging.EmptyTqdm

    def hook(_factory: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        items = list(args[0]) if args else []

        def iterate() -> Iterator[Any]:
            for number, item in enumerate(items):
                report("loading weights", number / len(items))
                yield item

        return silent(iterate())

    previous = hf_logging.set_tqdm_hook(hook)
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        hf_logging.set_tqdm_hook(previous)
