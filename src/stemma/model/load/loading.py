"""From a checkpoint to a `CausalLM`, or to one clear error.

What can't be served correctly is refused here, not found by a wrong answer later. A checkpoint that has just
the tensors of its family's layout runs as one native call a step (fused_loading.py). All others run through
the modules of transformers (module_loading.py), where a probe of two tokens shows whether every layer goes
through our attention and keeps no state other than its KV, and a self-check compares the logits over paged KV
with the model's own. Weights are finite, or refused.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, UnsupportedModel
from stemma.memory.device.accelerator import CUDA, accelerator_of, resolve_device
from stemma.model.attend.kept_kv import KeptKV, check_modules
from stemma.model.cpu.heads import kv_shape_of
from stemma.model.cpu.packing import Packing
from stemma.model.families.registry import family_of
from stemma.model.files.fingerprint import model_fingerprint
from stemma.model.files.generation import default_sampling, eos_token_ids
from stemma.model.files.progress import Progress
from stemma.model.foreign.vision import VisionEncoder, load_encoder
from stemma.model.load.device_loading import load_on_device
from stemma.model.load.fused_loading import fitting_layout, load_fused
from stemma.model.load.job import Loaded, LoadJob
from stemma.model.load.module_loading import load_by_modules
from stemma.model.load.plan import LoadPlan, begin_to_read
from stemma.model.load.prediction import with_prediction
from stemma.model.opened.abilities import Abilities
from stemma.model.opened.causal_lm import CausalLM, ModelInfo
from stemma.model.opened.checkpoint import DecoderParts, open_checkpoint
from stemma.model.opened.checkpoint_abilities import read_abilities
from stemma.model.opened.checkpoint_config import Description, describe_checkpoint, runs_remote_code
from stemma.model.opened.selfcheck import check_served
from stemma.model.parallel.cutting import check_cut
from stemma.model.parallel.group import RankGroup
from stemma.model.vision.family import VisionConfig
from stemma.model.weights.rounding import RoundInputs, RoundToNearest, round_to_nearest
from stemma.native.levels import NUMERIC_VERSION
from stemma.native.library import Kernels, load_kernels
from stemma.native.process_memory import trim_heap
from stemma.supervision import LoggingSupervisor

_NATIVE_DTYPES = (torch.bfloat16, torch.float32)


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
    described = describe_checkpoint(settings)
    config, longest = described.config, described.max_model_len
    device = resolve_device(settings.device)
    accelerator = accelerator_of(device)
    if predicts and device.type != "cpu":
        raise ConfigError("speculation is mtp, which runs on CPU only; take another speculation, e.g. auto")
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    # Compiling takes five seconds, once per machine; hashing reads the same files.
    with accelerator.scope(), ThreadPoolExecutor(2) as beside:
        compiling = beside.submit(load_kernels, settings.isa) if device.type == "cpu" else None
        is_first = group is None or group.share.rank == 0
        hashing = beside.submit(lambda: _fingerprint(settings, plan) if is_first else "")
        report("loading weights", 0.0)
        if plan is None:
            begin_to_read(settings.path, LoggingSupervisor())
        if group is not None:
            check_cut(settings, config, group.share)
        checkpoint = open_checkpoint(settings, config, described.vision)
        abilities = read_abilities(settings, checkpoint)
        kernels = compiling.result() if compiling and checkpoint.dtype in _NATIVE_DTYPES else None
        how = _rounding(settings, checkpoint, kernels)
        packing = None if kernels is None else Packing(kernels, checkpoint.dtype, how)
        load = LoadJob(settings, checkpoint, device, longest, packing, predicts, group, plan, report)
        loaded, encoder = _load(load, described.vision)
        trim_heap()
        report("reading the fingerprint", 0.0)
        fingerprint = hashing.result()
    fingerprint = fingerprint if how is None else how.fingerprint(fingerprint)
    info = _information(described, load, loaded, encoder, fingerprint, abilities)
    model = _model(load, loaded, info, encoder)
    report("self-check", 0.0)
    with accelerator.scope(), loaded.checked():
        bits = None if packing is None else packing.fewest_bits
        check_served(model, loaded.reference, bits, same_bits=packing is not None)
    report("ready", 1.0)
    return model


def stated_kv(settings: ModelSettings, *, predicts: bool) -> KeptKV | None:
    """Return what a checkpoint's config and headers say that the model keeps, on one rank.

    None: only its modules know, once it is loaded. Raises what `load_model` raises for such a checkpoint.
    """
    described = describe_checkpoint(settings)
    if runs_remote_code(settings):
        return None
    checkpoint = open_checkpoint(settings, described.config, described.vision)
    layout, family = fitting_layout(checkpoint), family_of(checkpoint.config.model_type)
    if layout is None or family is None:
        return None
    shape = kv_shape_of(layout)
    if predicts:
        shape = with_prediction(shape, int(checkpoint.config.hidden_size))
    device = resolve_device(settings.device).type
    if not _is_fused_elsewhere(settings, device):
        check_modules(shape, family.architecture, device)
    return KeptKV(shape, family.architecture, checkpoint.dtype, device, described.max_model_len)


def _is_fused_elsewhere(settings: ModelSettings, device: str) -> bool:
    return device == CUDA and settings.gpu_path == "fused"


def _load(load: LoadJob, vision: VisionConfig | None) -> tuple[Loaded, VisionEncoder | None]:
    """Return the decoder, and the vision encoder if the checkpoint has one.

    Raises UnsupportedModel for one with an encoder whose decoder reads no images, and for what the kernels
    of `gpu_path` fused don't compute.
    """
    if _is_fused_elsewhere(load.settings, load.device.type):
        return load_on_device(load, vision)
    is_own = load.group is None and not runs_remote_code(load.settings)
    packing, checkpoint = load.packing, load.checkpoint
    layout = fitting_layout(checkpoint) if packing is not None and is_own else None
    if vision is None:
        return load_by_modules(load) if layout is None else load_fused(load, layout), None
    by_modules = vision.family.num_whole is not None and is_own
    if packing is None or (layout is None and not by_modules):
        raise UnsupportedModel(
            f"{vision.family.architecture} reads images, which is served on CPU with kernels, in bfloat16 or "
            "float32, or on CUDA by gpu_path fused, by one process, from the tensors that the model was "
            "published with; stemma doctor says whether the kernels can be used"
        )
    loaded = load_by_modules(load) if layout is None else load_fused(load, layout)
    return loaded, load_encoder(checkpoint.path, vision, checkpoint.tower, checkpoint.dtype, packing)


def _model(load: LoadJob, loaded: Loaded, info: ModelInfo, encoder: VisionEncoder | None) -> CausalLM:
    context_size = 1 if load.group is None else load.group.share.context_size
    return CausalLM(
        loaded.decoder,
        info,
        loaded.kv_shape,
        load.device,
        load.checkpoint.dtype,
        context_size=context_size,
        encoder=encoder,
        choose=loaded.choose,
    )


def _information(
    described: Description,
    load: LoadJob,
    loaded: Loaded,
    encoder: VisionEncoder | None,
    fingerprint: str,
    abilities: Abilities,
) -> ModelInfo:
    """Return what is known of a model that is loaded."""
    packing, config = load.packing, described.config
    vocab_size = config.get_text_config().vocab_size
    numeric_path = (
        accelerator_of(load.device).numeric_path()
        if packing is None
        else f"{packing.kernels.level}-{NUMERIC_VERSION}"
    ) + loaded.computed_by
    return ModelInfo(
        architecture=loaded.architecture if encoder is None else encoder.config.family.architecture,
        vocab_size=vocab_size,
        max_model_len=described.max_model_len,
        eos_token_ids=eos_token_ids(described.generation, config, vocab_size),
        default_sampling=default_sampling(described.generation),
        fingerprint=fingerprint,
        weight_bytes=loaded.num_bytes
        + (0 if encoder is None else encoder.num_bytes)
        - (0 if packing is None else packing.saved_bytes),
        formats=_formats(load.checkpoint, loaded, packing),
        abilities=abilities,
        numeric_path=numeric_path,
    )


def _formats(checkpoint: DecoderParts, loaded: Loaded, packing: Packing | None) -> str:
    counts = replace(checkpoint.counts, num_quantized=loaded.num_codes)
    num_packed = 0 if packing is None else packing.num_quantized
    return counts.describe(str(checkpoint.dtype).removeprefix("torch."), num_packed)


def _fingerprint(settings: ModelSettings, plan: LoadPlan | None) -> str:
    early = None if plan is None else plan.fingerprint(settings.path)
    if early is not None and not settings.trust_remote_code:
        return early
    return model_fingerprint(settings.path, remote_code=runs_remote_code(settings))


def _rounding(
    settings: ModelSettings, checkpoint: DecoderParts, kernels: Kernels | None
) -> RoundToNearest | RoundInputs | None:
    """Return how plain weights, or inputs, are to be rounded. Raises ConfigError where they can't be."""
    if settings.quantize == "none":
        return None
    if kernels is None:
        raise ConfigError(
            f"quantize is {settings.quantize}, which needs the CPU kernels; stemma doctor says what is wrong"
        )
    if settings.quantize == "inputs":
        if checkpoint.codes:
            return RoundInputs()
        raise ConfigError(
            "quantize is inputs, which keeps a checkpoint's quantized weights and rounds what they are "
            "multiplied with, but this checkpoint's weights are plain; take int8 or int4, or leave it out"
        )
    if checkpoint.codes:
        raise ConfigError(
            f"quantize is {settings.quantize}, but the checkpoint is quantized already; leave it out, or "
            "take inputs"
        )
    return round_to_nearest(8 if settings.quantize == "int8" else 4, settings.quantize_group_size)
