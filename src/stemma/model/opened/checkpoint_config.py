"""A checkpoint's own description: its config, its defaults of generation, its dtype and longest context.

Foreign code reads the config, maybe the checkpoint's own: any exception of it becomes a ModelError.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError, UnsupportedModel
from stemma.foreign_code import ForeignCode
from stemma.memory.device.kv import TORCH_DTYPES
from stemma.model.attend.attention import SUPPORTED
from stemma.model.families.registry import family_of
from stemma.model.files.directory import CONFIG, StoredTensor, check_directory, has_file, is_gguf, read_json
from stemma.model.files.extent import check_counts
from stemma.model.files.llama_config import read_llama_config
from stemma.model.vision.checkpoint import text_config_of, vision_config_of
from stemma.model.vision.family import VisionConfig

_GENERATION = "generation_config.json"
_SERVED_LAYER_TYPES = frozenset(
    {
        *("full_attention", "sliding_attention", "chunked_attention"),
        *("linear_attention", "conv", "hybrid", "moe", "mlp"),
    }
)
SCORE_WEIGHT = "score.weight"
"""The name of a sequence classifier's head in all families of transformers."""
STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float32}
"""Dtypes of plain weights in safetensors, and those that hold them in memory."""


@dataclass(frozen=True, slots=True)
class Description:
    """A checkpoint's account of itself, found fit to be served as the settings ask."""

    config: Any
    """That of transformers, of the language model alone."""
    generation: dict[str, Any]
    """Its defaults of generation."""
    max_model_len: int
    """Tokens of prompt plus output."""
    vision: VisionConfig | None = None
    """Of its vision encoder; None: it reads text alone."""


def describe_checkpoint(settings: ModelSettings) -> Description:
    """Return what a checkpoint of this machine says of itself, without its weights.

    Raises ModelError if it is missing, broken or no causal LM, UnsupportedModel if its architecture can't be
    served, ConfigError if a setting contradicts it.
    """
    check_directory(settings.path)
    config = load_config(settings)
    vision = vision_config_of(settings.path, config)
    if vision is not None:
        config = text_config_of(vision)
    return Description(config, load_generation(settings.path), max_model_len(settings, config), vision)


def runs_remote_code(settings: ModelSettings) -> bool:
    """Whether the model's code comes from the checkpoint."""
    if is_gguf(settings.path):
        return False
    auto_map = read_json(settings.path / CONFIG).get("auto_map")
    return settings.trust_remote_code and isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map


def load_config(settings: ModelSettings) -> Any:
    """Return the transformers config of a causal LM, or of one behind a vision encoder; raise ModelError."""
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
    with ForeignCode(
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
    from stemma.model.files.gguf_header import read_header
    from stemma.model.formats.gguf.config import read_config

    with ForeignCode(f"transformers can't use the metadata of {settings.path}"):
        config = read_config(read_header(settings.path))
        _check_architecture(settings, config)
    return config


def load_generation(path: Path) -> dict[str, Any]:
    """Return the checkpoint's generation_config.json, empty without one; of GGUF, what the file says."""
    if is_gguf(path):
        from stemma.model.files.gguf_header import read_header
        from stemma.model.formats.gguf.vocabulary import end_token_ids

        ids = end_token_ids(read_header(path))
        return {"eos_token_id": list(ids)} if ids else {}
    return read_json(path / _GENERATION) if has_file(path, _GENERATION) else {}


def _known_model_types() -> Container[object]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING


def _check_architecture(settings: ModelSettings, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if vision_config_of(settings.path, config) is not None:
        return
    architectures = list(getattr(config, "architectures", None) or [])
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if _is_headless(settings.path, config) or is_classifier(config):
        architectures = [name for name in (causal,) if name is not None]
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
    if (family := family_of(config.model_type)) is not None:
        layer_types -= family.layer_types
    if layer_types - _SERVED_LAYER_TYPES:
        named = str((architectures or [config.model_type])[0])
        other = ", ".join(sorted(layer_types - _SERVED_LAYER_TYPES))
        raise UnsupportedModel(f"{named} has layers of type {other}. {SUPPORTED}")
    attention_chunks(config.get_text_config())


def is_classifier(config: Any) -> bool:
    """Whether the checkpoint holds a causal model with a head of scores, as transformers names them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    named = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    return named is not None and list(getattr(config, "architectures", None) or []) == [named]


def _is_headless(path: Path, config: Any) -> bool:
    """Whether the checkpoint holds a model without an output head, for embeddings."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    named = MODEL_MAPPING_NAMES.get(config.model_type)
    return list(getattr(config, "architectures", None) or []) == [named] and has_file(path, "modules.json")


def quantization_of(config: Any) -> dict[str, Any]:
    """Return what config.json says about quantized weights; empty: nothing."""
    given = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if given is None:
        return {}
    return dict(given if isinstance(given, dict) else given.to_dict())


def dtype_of(settings: ModelSettings, config: Any, stored: list[StoredTensor]) -> torch.dtype:
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
        if tensor.dtype in STORED_DTYPES:
            dtype = STORED_DTYPES[tensor.dtype]
            num_bytes[dtype] = num_bytes.get(dtype, 0) + tensor.num_bytes
    return max(num_bytes, key=lambda dtype: num_bytes[dtype])


def max_model_len(settings: ModelSettings, config: Any) -> int:
    """Return the longest prompt and output together, in tokens. Raises ConfigError, ModelError."""
    """Return the longest prompt and output together, in tokens. Raises ConfigError, ModelError."""
    with ForeignCode(f"{settings.path} has a config.json whose context length can't be read"):
        limit = context_limit(config.get_text_config())
    if limit is not None and limit < 2:
        raise ModelError(f"{settings.path}: config.json says that the model's context is {limit} tokens")
    if settings.max_model_len is None:
        if limit is None:
            raise ConfigError(f"{settings.path} names no max_position_embeddings; set max_model_len")
        return limit
    if limit is not None and settings.max_model_len > limit:
        raise ConfigError(f"max_model_len is {settings.max_model_len}, but the model ends at {limit}")
    return settings.max_model_len


def context_limit(config: Any) -> int | None:
    """Return the longest context in which a token's KV depends on nothing after it; None if unknown.

    Some rotary embeddings (dynamic NTK, LongRoPE) rotate all keys differently once the context exceeds the
    training length. KV computed before is then wrong, in any cache; such models are limited to that length.
    """
    whole = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [] if whole is None else [int(whole)]
    for parameters in _rope_parameters(rope):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            trained = parameters.get("original_max_position_embeddings")
            trained = trained or getattr(config, "original_max_position_embeddings", None) or whole
            limits += [int(trained)] if trained else []
    return min(limits, default=None)


def attention_chunks(config: Any) -> dict[int | None, int]:
    """Return by layer the length of the pieces in which it attends (Llama 4), in tokens.

    Raises UnsupportedModel if the config doesn't say it.
    """
    types = getattr(config, "layer_types", None) or ()
    layers = [layer for layer, kind in enumerate(types) if kind == "chunked_attention"]
    size = getattr(config, "attention_chunk_size", None)
    if layers and (not isinstance(size, int) or size < 1):
        raise UnsupportedModel(
            f"config.json has layers of chunked attention and attention_chunk_size {size!r}; it must be "
            "the number of tokens of a chunk"
        )
    return {layer: int(size) for layer in layers} if size else {}


def _rope_parameters(rope: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the parameters of all rotary embeddings: one for all layers, or one per layer type."""
    per_type = [value for value in rope.values() if isinstance(value, dict)]
    return per_type or [rope]
