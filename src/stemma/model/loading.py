"""From a checkpoint directory to a `CausalLM`, or to one clear error.

What can't be served right is found here, not by a wrong answer later: the directory, its architecture, its
weights, and, by a probe of two tokens, whether every layer really goes through our attention and keeps no
other state than the KV it shows us.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError, UnsupportedModel
from stemma.memory.device.kv import TORCH_DTYPES
from stemma.model.attention import ATTENTION, STEP_KEYWORD, SUPPORTED, AttentionCall, AttentionProbe
from stemma.model.causal_lm import CausalLM, Decoder, KVShape, ModelInfo, ModuleDecoder
from stemma.model.cpu.experts import pack_experts
from stemma.model.cpu.fused import FusedDecoder, follows_pattern
from stemma.model.cpu.weights import can_pack, pack_linears, plain_layers
from stemma.model.cuda.execution import make_cuda_decoder
from stemma.model.fingerprint import model_fingerprint
from stemma.model.latent import cache_latents
from stemma.native.library import Kernels, load_kernels
from stemma.native.process_memory import MappedFiles, large_blocks_apart, trim_heap

Progress: TypeAlias = Callable[[str, float], None]
"""Called with what is going on and the share of it that is done, 0..1."""

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load_model(settings: ModelSettings, progress: Progress | None = None) -> CausalLM:
    """Load the checkpoint that `settings` name.

    Raises ModelError if it is missing, broken or no causal LM, UnsupportedModel if its architecture can't be
    served, ConfigError if a setting contradicts it.
    """
    report = progress or (lambda _stage, _share: None)
    path = settings.path
    config = _load_config(path, settings.trust_remote_code)
    _check_architecture(path, config)
    max_model_len = _max_model_len(settings, config)
    device = resolve_device(settings.device)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    report("reading the fingerprint", 0.0)
    # Compiling takes five seconds, once a machine; it goes on beside the loading.
    compiling = ThreadPoolExecutor(1).submit(load_kernels, settings.isa) if device.type == "cpu" else None
    fingerprint = model_fingerprint(path)
    hf_model = _load_weights(settings, config, device, report)
    cache_latents(hf_model)
    report("probing", 0.0)
    kv_shape, calls = probe(hf_model)
    weight_bytes = sum(p.numel() * p.element_size() for p in hf_model.parameters())
    dtype: torch.dtype = hf_model.dtype
    kernels = compiling.result() if compiling and dtype in (torch.bfloat16, torch.float32) else None
    checkpoint = MappedFiles(path.glob("*.safetensors"))

    def packing(share: float) -> None:
        checkpoint.drop_pages()  # or memory would hold every weight twice, as read and as packed
        report("packing weights", share)

    with large_blocks_apart():
        decoder = _make_decoder(hf_model, calls, kernels, packing)
    trim_heap()
    if device.type == "cuda":
        decoder = make_cuda_decoder(
            hf_model, device, max_context=max_model_len, use_graphs=settings.cuda_graphs
        )
    generation = _read_json(path / "generation_config.json") if _has(path, "generation_config.json") else {}
    info = ModelInfo(
        architecture=type(hf_model).__name__,
        vocab_size=config.get_text_config().vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(generation, config),
        default_sampling=_default_sampling(generation),
        fingerprint=fingerprint,
        weight_bytes=weight_bytes,
    )
    report("ready", 1.0)
    return CausalLM(decoder, info, kv_shape, device, dtype)


def resolve_device(name: str) -> torch.device:
    """Turn a setting into a device; `auto` is CUDA if there is one. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device; use cpu")
    return device


def _has(path: Path, name: str) -> bool:
    return (path / name).is_file()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} isn't a JSON object")
    return content


def _load_config(path: Path, trust_remote_code: bool) -> Any:
    if not path.is_dir():
        raise ModelError(f"no model directory {path}; give the path of a downloaded Hugging Face checkpoint")
    if not _has(path, "config.json"):
        raise ModelError(f"{path} has no config.json; give the directory that holds the checkpoint's files")
    raw = _read_json(path / "config.json")
    foreign = bool(raw.get("auto_map")) and raw.get("model_type") not in _known_model_types()
    if foreign and not trust_remote_code:
        raise ModelError(
            f"{path} brings its own Python code; if you trust it, allow it with trust_remote_code"
        )
    try:
        return AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"transformers can't read {path / 'config.json'}: {error}") from error


def _known_model_types() -> Container[object]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING


def _check_architecture(path: Path, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = list(getattr(config, "architectures", None) or [])
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not remote and (causal is None or (architectures and causal not in architectures)):
        named = ", ".join(architectures) or config.model_type
        raise ModelError(f"{path} holds {named}, which is no causal language model. {SUPPORTED}")
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or [])
    if layer_types - _SERVED_LAYER_TYPES:
        other = ", ".join(sorted(layer_types - _SERVED_LAYER_TYPES))
        raise UnsupportedModel(f"{named_architecture(config)} has layers of type {other}. {SUPPORTED}")


def named_architecture(config: Any) -> str:
    """Return the first architecture of a config, for messages."""
    return str((getattr(config, "architectures", None) or [config.model_type])[0])


def _max_model_len(settings: ModelSettings, config: Any) -> int:
    limit = _context_limit(config.get_text_config())
    if settings.max_model_len is None:
        if limit is None:
            raise ConfigError(f"{settings.path} names no max_position_embeddings; set max_model_len")
        return limit
    if limit is not None and settings.max_model_len > limit:
        raise ConfigError(f"max_model_len is {settings.max_model_len}, but the model ends at {limit}")
    return settings.max_model_len


def _context_limit(config: Any) -> int | None:
    """Return the longest context in which a token's KV depends on nothing after it; None if unknown.

    Some rotary embeddings (dynamic NTK, LongRoPE) turn all keys anew once the context outgrows the length of
    their training. KV computed before is then wrong, in any cache; such models end at that length here.
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        trained = rope.get("original_max_position_embeddings")
        return int(trained or getattr(config, "original_max_position_embeddings", None) or limit or 0) or None
    return None if limit is None else int(limit)


@contextmanager
def _weights_progress(report: Progress) -> Iterator[None]:
    """Turn transformers' own progress bar into calls of `report`."""

    silent: Any = hf_logging.EmptyTqdm

    def hook(_factory: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        items = list(args[0]) if args else []

        def iterate() -> Iterator[Any]:
            for number, item in enumerate(items):
                report("loading weights", number / len(items))
                yield item

        return silent(iterate())

    previous = hf_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        hf_logging.set_tqdm_hook(previous)


def _load_weights(settings: ModelSettings, config: Any, device: torch.device, report: Progress) -> Any:
    dtype: Any = "auto" if settings.dtype == "auto" else TORCH_DTYPES[settings.dtype]
    if dtype == "auto" and getattr(config, "dtype", None) not in TORCH_DTYPES.values():
        dtype = torch.float32
    auto: Any = AutoModelForCausalLM
    try:
        with _weights_progress(report):
            model, loaded = auto.from_pretrained(
                str(settings.path),
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=settings.trust_remote_code,
                attn_implementation="eager",
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"can't load {settings.path}: {error}") from error
    missing = sorted({*loaded["missing_keys"], *(key[0] for key in loaded["mismatched_keys"])})
    if missing:
        raise ModelError(
            f"{settings.path} lacks {len(missing)} weights of {type(model).__name__}, "
            f"e.g. {', '.join(missing[:3])}; is the download complete?"
        )
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(f"{type(model).__name__} has no attention interface. {SUPPORTED}")
    model = model.to(device).eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    return model


def _make_decoder(
    hf_model: Any, calls: list[AttentionCall], kernels: Kernels | None, report: Callable[[float], None]
) -> Decoder:
    """Choose how to run the model: fused layers on CPU where they fit, else its own modules."""
    pack = can_pack(hf_model.dtype, hf_model.device)
    if pack:
        pack_experts(hf_model)
    if kernels is not None and follows_pattern(hf_model):
        return FusedDecoder(hf_model, calls, kernels, pack=pack, report=report)
    if pack:
        pack_linears(hf_model, plain_layers(hf_model), report)
    return ModuleDecoder(hf_model, kernels)


def probe(hf_model: Any) -> tuple[KVShape, list[AttentionCall]]:
    """Run two tokens through the model; return the KV and the calls that its layers hand to attention.

    Raises UnsupportedModel if a layer bypasses attention, hides state from it, or differs from the others.
    """
    config = hf_model.config.get_text_config()
    name = type(hf_model).__name__
    recorder = AttentionProbe()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=hf_model.device)
    with torch.inference_mode():
        try:
            hf_model(
                input_ids=tokens,
                position_ids=torch.arange(2, device=hf_model.device)[None],
                use_cache=False,
                logits_to_keep=torch.tensor([1], device=hf_model.device),
                **{STEP_KEYWORD: recorder},
            )
        except TypeError as error:
            raise UnsupportedModel(f"{name} doesn't take our keywords: {error}. {SUPPORTED}") from error
    calls = {call.layer_idx: (call, heads, dim, value) for call, heads, dim, value in recorder.calls}
    num_layers = config.num_hidden_layers
    if len(recorder.calls) != num_layers or sorted(calls) != list(range(num_layers)):
        raise UnsupportedModel(
            f"{name}: {len(calls)} of {num_layers} layers go through attention. {SUPPORTED}"
        )
    ordered = [calls[index][0] for index in range(num_layers)]
    _check_windows(name, config, [call.sliding_window for call in ordered])
    shapes = {(heads, max(dim, value), call.latent is None) for call, heads, dim, value in calls.values()}
    if len(shapes) != 1:
        raise UnsupportedModel(f"{name}: layers keep KV of different shapes. {SUPPORTED}")
    heads, dim, has_value = shapes.pop()
    return KVShape(num_layers, 2 if has_value else 1, heads, dim), ordered


def _check_windows(name: str, config: Any, passed: list[int | None]) -> None:
    """Refuse a model that would apply its sliding window by a mask we never see."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    for index, seen in enumerate(passed):
        slides = layer_types[index] == "sliding_attention" if layer_types else window is not None
        if slides and seen is None:
            raise UnsupportedModel(f"{name}: layer {index} hides its sliding window. {SUPPORTED}")


def _eos_token_ids(generation: dict[str, Any], config: Any) -> tuple[int, ...]:
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = getattr(config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _default_sampling(generation: dict[str, Any]) -> dict[str, float | int]:
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: generation[name] for name in _SAMPLING_FIELDS if generation.get(name) is not None}
