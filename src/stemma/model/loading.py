"""From a checkpoint to a `CausalLM`, or to one clear error.

What can't be served correctly is refused here, not found by a wrong answer later. The checks: the directory
(directory.py); architecture and weights (pretrained.py), all finite (weight_check.py); a probe of two tokens,
which shows whether every layer goes through our attention and keeps no state other than its KV; and a
self-check (selfcheck.py), which compares the logits over paged KV with the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, ModelError, UnsupportedModel
from stemma.model.attention import (
    STEP_KEYWORD,
    SUPPORTED,
    AttentionCall,
    AttentionProbe,
    use_paged_attention,
)
from stemma.model.causal_lm import CausalLM, Decoder, KVShape, ModelInfo
from stemma.model.cpu.experts import pack_experts
from stemma.model.cpu.fused import FusedDecoder, follows_pattern
from stemma.model.cpu.latent import pack_latents
from stemma.model.cpu.linears import pack_linears, plain_layers
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.rowwise import RowwiseOperations
from stemma.model.cpu.weight_memory import weights_together
from stemma.model.cuda.execution import make_cuda_decoder
from stemma.model.dense import DenseModel
from stemma.model.directory import check_directory, is_gguf, stored_tensors, weight_files
from stemma.model.early_packing import EarlyPacking
from stemma.model.families.registry import TESTED
from stemma.model.fingerprint import model_fingerprint
from stemma.model.foreign import foreign_code
from stemma.model.formats.reading import find_format
from stemma.model.generation import default_sampling, eos_token_ids
from stemma.model.latent import cache_latents
from stemma.model.parallel.context import ContextDecoder
from stemma.model.parallel.group import RankGroup
from stemma.model.parallel.sums import add_sums
from stemma.model.plan import LoadPlan
from stemma.model.prediction import (
    MainDecoder,
    PredictingDecoder,
    StatesOfModules,
    add_prediction_layer,
)
from stemma.model.pretrained import (
    Progress,
    load_config,
    load_generation,
    load_weights,
    quantization_of,
    runs_remote_code,
)
from stemma.model.quantization.attach import detach, has_attached, stacked_spares_rest
from stemma.model.quantization.quantize import RoundInputs, RoundToNearest, round_to_nearest
from stemma.model.selfcheck import (
    FirstLayers,
    Reference,
    check_served,
    needs_check,
    take_reference,
)
from stemma.model.weight_check import check_weights
from stemma.native.levels import NUMERIC_VERSION
from stemma.native.library import Kernels, load_kernels
from stemma.native.process_memory import MappedFiles, large_blocks_apart, trim_heap

__all__ = ["Progress", "load_model", "probe", "resolve_device"]


def load_model(
    settings: ModelSettings,
    progress: Progress | None = None,
    *,
    predicts: bool = False,
    group: RankGroup | None = None,
    plan: LoadPlan | None = None,
) -> CausalLM:
    """Load the checkpoint that `settings` name; with `predicts`, its layer for multi-token prediction too.

    `plan`: what was begun of it before; what doesn't fit is made anew.

    With a `group` of ranks, load this rank's share, while the others load theirs: the checks at the end are
    steps of all. Only rank 0 reads the fingerprint; that of the others is empty.

    Raises ModelError if it is missing, broken or no causal LM, UnsupportedModel if its architecture can't be
    served, ConfigError if a setting contradicts it.
    """
    report = progress or (lambda _stage, _share: None)
    path = settings.path
    check_directory(path)
    config = load_config(settings)
    generation = load_generation(path)
    max_model_len = _max_model_len(settings, config)
    device = resolve_device(settings.device)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    # Compiling takes five seconds, once per machine; hashing reads the same files. Both run during the load.
    with ThreadPoolExecutor(2) as beside:
        compiling = beside.submit(load_kernels, settings.isa) if device.type == "cpu" else None
        is_first = group is None or group.share.rank == 0
        hashing = beside.submit(lambda: _fingerprint(settings, plan) if is_first else "")
        share = None if group is None else group.share
        spared = TESTED if compiling and _keeps_codes(settings, config) and compiling.result() else ()
        dense = compiling is not None and group is None and not predicts and compiling.result() is not None
        hf_model, counts = load_weights(settings, config, device, report, spared, share, dense=dense)
        if plan is not None and plan.packing is not None:
            _take_packed(plan.packing, hf_model, settings, config)
        if predicts:
            add_prediction_layer(settings, config, hf_model)
        report("reading the fingerprint", 0.0)
        fingerprint = hashing.result()
        dtype: torch.dtype = hf_model.dtype
        kernels = compiling.result() if compiling and dtype in (torch.bfloat16, torch.float32) else None
    rounding = _rounding(settings, hf_model, kernels)
    info = ModelInfo(
        architecture=_architecture(hf_model),
        vocab_size=config.get_text_config().vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids(generation, config, config.get_text_config().vocab_size),
        default_sampling=default_sampling(generation),
        fingerprint=fingerprint if rounding is None else rounding.fingerprint(fingerprint),
        weight_bytes=sum(p.numel() * p.element_size() for p in hf_model.parameters()),
        numeric_path=device.type if kernels is None else f"{kernels.level}-{NUMERIC_VERSION}",
    )
    packing = None if kernels is None else Packing(kernels, dtype, rounding)
    if group is not None and group.share.size > 1:
        add_sums(hf_model, group)
    model = _make_servable(hf_model, info, device, packing, settings, report, group, plan)
    num_packed = 0 if packing is None else packing.num_quantized
    formats = counts.describe(str(dtype).removeprefix("torch."), num_packed)
    model.info = replace(model.info, formats=formats)
    report("ready", 1.0)
    return model


def _fingerprint(settings: ModelSettings, plan: LoadPlan | None) -> str:
    early = None if plan is None else plan.fingerprint(settings.path)
    if early is not None and not settings.trust_remote_code:
        return early
    return model_fingerprint(settings.path, remote_code=runs_remote_code(settings))


def _take_packed(early: EarlyPacking, hf_model: Any, settings: ModelSettings, config: Any) -> None:
    """Give a model its packed weights if a thread has made them of the same files; free others."""
    if isinstance(hf_model, DenseModel) and settings.quantize == "none" and not is_gguf(settings.path):
        hf_model.packed = early.take(
            stored_tensors(settings.path),
            hf_model.dtype,
            is_tied=bool(config.tie_word_embeddings),
            isa=settings.isa,
        )
    early.close()


def _architecture(model: Any) -> str:
    return model.architecture if isinstance(model, DenseModel) else type(model).__name__


def _keeps_codes(settings: ModelSettings, config: Any) -> bool:
    """Whether the checkpoint's weights may be packed as the codes that they are."""
    return find_format(settings.path, quantization_of(config)) is not None


def _make_servable(
    hf_model: Any,
    info: ModelInfo,
    device: torch.device,
    packing: Packing | None,
    settings: ModelSettings,
    report: Progress,
    group: RankGroup | None,
    plan: LoadPlan | None,
) -> CausalLM:
    """Check a model, put our attention into it and choose how it runs; it is taken apart.

    With a `group` it is a rank's share.
    """
    is_packed = isinstance(hf_model, DenseModel) and hf_model.packed is not None
    checkpoint = MappedFiles([] if is_packed else weight_files(settings.path))

    def reporting(stage: str) -> Callable[[float], None]:
        def dropping_pages(share: float) -> None:
            checkpoint.drop_pages()  # otherwise memory would hold every weight twice, as read and as packed
            report(stage, share)

        return dropping_pages

    if not is_packed:
        check_weights(hf_model, settings.path, reporting("checking weights"))
    report("probing", 0.0)
    reference: Reference | None = None
    # On CUDA the steps may be recorded with all layers.
    checked = FirstLayers.of(hf_model).alone if device.type == "cpu" else nullcontext
    if isinstance(hf_model, DenseModel):
        kv_shape, calls = hf_model.attention()
    else:
        if needs_check(hf_model):
            with checked():
                reference = take_reference(hf_model)
        with foreign_code(f"can't run {info.architecture}"):
            use_paged_attention(hf_model)
            cache_latents(hf_model)
            kv_shape, calls = probe(
                hf_model, last_position=info.max_model_len - 1, after_layer=checkpoint.drop_pages
            )
    if hasattr(hf_model, "stemma_prediction"):
        kv_shape = replace(kv_shape, num_layers=kv_shape.num_layers + 1)
    with large_blocks_apart(), weights_together(None if plan is None else plan.take_memory()):
        decoder = _make_decoder(hf_model, calls, packing, reporting("packing weights"), group)
    trim_heap()
    if packing is not None:
        info = replace(info, weight_bytes=info.weight_bytes - packing.saved_bytes)
    context_size = 1 if group is None else group.share.context_size
    has_sinks = any(call.sinks is not None for call in calls)  # Triton's kernels know none
    if device.type == "cuda" and context_size == 1 and not has_sinks:
        use_graphs = settings.cuda_graphs and group is None
        decoder = make_cuda_decoder(hf_model, device, max_context=info.max_model_len, use_graphs=use_graphs)
    model = CausalLM(decoder, info, kv_shape, device, hf_model.dtype, context_size=context_size)
    report("self-check", 0.0)
    with nullcontext() if reference is None else checked():
        check_served(model, reference, None if packing is None else packing.fewest_bits)
    return model


def _rounding(
    settings: ModelSettings, hf_model: Any, kernels: Kernels | None
) -> RoundToNearest | RoundInputs | None:
    """Return how plain weights, or inputs, are to be rounded. Raises ConfigError where they can't be."""
    if settings.quantize == "none":
        return None
    if kernels is None:
        raise ConfigError(
            f"quantize is {settings.quantize}, which needs the CPU kernels; stemma doctor says what is wrong"
        )
    if settings.quantize == "inputs":
        if has_attached(hf_model):
            return RoundInputs()
        raise ConfigError(
            "quantize is inputs, which keeps a checkpoint's quantized weights and rounds what they are "
            "multiplied with, but this checkpoint's weights are plain; take int8 or int4, or leave it out"
        )
    if has_attached(hf_model):
        raise ConfigError(
            f"quantize is {settings.quantize}, but the checkpoint is quantized already; leave it out, or "
            "take inputs"
        )
    return round_to_nearest(8 if settings.quantize == "int8" else 4, settings.quantize_group_size)


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


def _max_model_len(settings: ModelSettings, config: Any) -> int:
    with foreign_code(f"{settings.path} has a config.json whose context length can't be read"):
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


def _rope_parameters(rope: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the parameters of all rotary embeddings: one for all layers, or one per layer type."""
    per_type = [value for value in rope.values() if isinstance(value, dict)]
    return per_type or [rope]


def _make_decoder(
    hf_model: Any,
    calls: list[AttentionCall],
    packing: Packing | None,
    report: Callable[[float], None],
    group: RankGroup | None,
) -> Decoder:
    """Choose how to run the model: fused layers on CPU where they fit, else its own modules."""
    if group is not None and group.share.context_size > 1:
        if packing is not None:
            _pack_modules(hf_model, packing, report)
        decoder = ContextDecoder(hf_model, packing, group)
        detach(hf_model)
        return decoder
    predicts = hasattr(hf_model, "stemma_prediction")
    kernels = None if packing is None else packing.kernels
    main: MainDecoder
    operations: RowwiseOperations | None
    is_dense = isinstance(hf_model, DenseModel)
    if packing is not None and group is None and (is_dense or follows_pattern(hf_model)):
        packed = hf_model.packed if isinstance(hf_model, DenseModel) else None
        main = FusedDecoder(hf_model, calls, packing, report, packed)
        operations = RowwiseOperations(packing.kernels)
        if predicts:
            _pack_modules(hf_model.stemma_prediction, packing, lambda _share: None)
    else:
        if packing is not None:
            _pack_modules(hf_model, packing, report)
        advice = "; compare config.json with the one the checkpoint was published with"
        with foreign_code(f"can't run {type(hf_model).__name__}", advice):
            modules = StatesOfModules(hf_model, packing)
        main, operations = modules, modules.operations
    detach(hf_model)
    return PredictingDecoder(hf_model, main, kernels, operations) if predicts else main


def _pack_modules(module: Any, packing: Packing, report: Callable[[float], None]) -> None:
    """Pack the weights of modules that run as they are."""
    pack_experts(module, packing)
    pack_latents(module, packing.kernels)
    pack_linears(module, packing, plain_layers(module), report)


def probe(
    hf_model: Any, *, last_position: int = 1, after_layer: Callable[[], None] | None = None
) -> tuple[KVShape, list[AttentionCall]]:
    """Return the shape of the KV that the layers of a model keep, and their attention calls.

    Two tokens run through the model, at positions 0 and `last_position`; `after_layer` is called in each
    layer. Raises UnsupportedModel if a layer bypasses attention, keeps other state, or differs from the
    others; ModelError without that position.
    """
    config = hf_model.config.get_text_config()
    name = type(hf_model).__name__
    recorder = AttentionProbe(after_layer)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=hf_model.device)
    with torch.inference_mode(), stacked_spares_rest(hf_model):
        try:
            hf_model(
                input_ids=tokens,
                position_ids=torch.tensor([[0, last_position]], device=hf_model.device),
                use_cache=False,
                logits_to_keep=torch.tensor([1], device=hf_model.device),
                **{STEP_KEYWORD: recorder},
            )
        except TypeError as error:
            raise UnsupportedModel(f"{name} doesn't take our keywords: {error}. {SUPPORTED}") from error
        except IndexError as error:
            raise ModelError(
                f"{name} has no position {last_position}; set a smaller max_model_len"
            ) from error
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
    latent = ordered[0].latent
    rank = 0 if latent is None else latent.rank
    return KVShape(num_layers, 2 if has_value else 1, heads, dim, rank), ordered


def _check_windows(name: str, config: Any, passed: list[int | None]) -> None:
    """Refuse a model that applies its sliding window by a mask that isn't passed to us."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    for index, seen in enumerate(passed):
        slides = layer_types[index] == "sliding_attention" if layer_types else window is not None
        if slides and seen is None:
            raise UnsupportedModel(f"{name}: layer {index} hides its sliding window. {SUPPORTED}")
