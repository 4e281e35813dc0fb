"""From a checkpoint to a decoder that runs the modules of transformers, ours or a rank's share of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers

from stemma.foreign_code import ForeignCode
from stemma.memory.device.accelerator import CUDA
from stemma.model.attend.attention import AttentionCall
from stemma.model.attend.kept_kv import check_modules
from stemma.model.cpu.weight_memory import weights_together
from stemma.model.cuda.execution import make_cuda_decoder, triton_version
from stemma.model.families.cuts import Cuts
from stemma.model.files.directory import weight_files
from stemma.model.foreign.attention import use_paged_attention
from stemma.model.foreign.compression import compress_attention
from stemma.model.foreign.decoder import ModuleDecoder
from stemma.model.foreign.latent import cache_latents
from stemma.model.foreign.loading import RankPart, load_modules
from stemma.model.foreign.packing import pack_modules
from stemma.model.foreign.probe import probe
from stemma.model.foreign.reference import FirstLayers, needs_check, take_reference
from stemma.model.foreign.sparse import index_latents
from stemma.model.foreign.weights import ModuleWeights
from stemma.model.formats.weight_check import check_weights
from stemma.model.load.job import Loaded, LoadJob
from stemma.model.load.prediction import (
    PredictingDecoder,
    PredictionLayer,
    StatesOfModules,
    read_prediction_layer,
    with_prediction,
)
from stemma.model.opened.causal_lm import Decoder
from stemma.model.opened.selfcheck import Reference
from stemma.model.parallel.context import ContextDecoder
from stemma.model.parallel.cutting import check_cut, cut_buffers, cut_class, read_share
from stemma.model.parallel.share import num_experts_of
from stemma.model.parallel.sums import add_sums
from stemma.native.process_memory import MappedFiles, large_blocks_apart


def load_by_modules(load: LoadJob) -> Loaded:
    """Return the decoder of what `load` names, with what the model computes by itself.

    Raises ModelError, UnsupportedModel, or ConfigError where a setting contradicts the checkpoint.
    """
    if load.plan is not None:
        load.plan.drop_packed()
    cuts = None if load.group is None else check_cut(load.settings, load.checkpoint.config, load.group.share)
    part = None if cuts is None else _cut_of(load, cuts)
    hf_model, weights = load_modules(load.settings, load.checkpoint, load.device, load.report, part)
    architecture = type(hf_model).__name__
    layer = _prediction_layer(load, hf_model)
    num_bytes = sum(p.numel() * p.element_size() for m in (hf_model, layer) if m for p in m.parameters())
    if load.group is not None and cuts is not None and load.group.share.size > 1:
        cut_buffers(hf_model, load.group.share, cuts)
        add_sums(hf_model, load.group, cuts)
    files = MappedFiles(weight_files(load.settings.path))
    for model in (hf_model, layer):
        if model is not None:
            check_weights(model, load.settings.path, _dropping_pages(load, files, "checking weights"))
    load.report("probing", 0.0)
    reference, checked = _reference(load, hf_model)
    with ForeignCode(f"can't run {architecture}"):
        use_paged_attention(hf_model)
        cache_latents(hf_model)
        index_latents(hf_model)
        compress_attention(hf_model)
        kv_shape, calls = probe(hf_model, last_position=load.max_model_len - 1, after_layer=files.drop_pages)
    check_modules(kv_shape, architecture, load.device.type)
    memory = None if load.plan is None else load.plan.take_memory()
    report = _dropping_pages(load, files, "packing weights")
    with large_blocks_apart(), weights_together(memory):
        decoder = _decoder(load, hf_model, weights, layer, calls, report)
    return Loaded(
        decoder,
        kv_shape if layer is None else with_prediction(kv_shape, layer.enorm.weight.shape[0]),
        architecture,
        num_bytes,
        weights.num_codes,
        reference,
        checked if reference is not None else nullcontext,
        _computed_by(load),
    )


def _computed_by(load: LoadJob) -> str:
    """Return whose products and sums these are; beside the host attention may be a kernel of Triton's."""
    versions = f":torch-{torch.__version__}:transformers-{transformers.__version__}"
    return versions if load.device.type == "cpu" else f":modules{versions}:{triton_version()}"


def _cut_of(load: LoadJob, cuts: Cuts) -> RankPart:
    """Return the rank's part of the checkpoint."""
    assert load.group is not None
    share = load.group.share
    num_experts = num_experts_of(load.checkpoint.config.get_text_config())
    weights = read_share(load.settings.path, share, cuts, num_experts)
    return RankPart(weights, partial(cut_class, share=share, cuts=cuts))


def _prediction_layer(load: LoadJob, hf_model: Any) -> PredictionLayer | None:
    if not load.predicts:
        return None

    def main_weight(name: str) -> torch.Tensor:
        weight: torch.Tensor = hf_model.get_parameter(name).detach()
        return weight

    return read_prediction_layer(load.checkpoint, type(hf_model), main_weight)


def _reference(
    load: LoadJob, hf_model: Any
) -> tuple[Reference | None, Callable[[], AbstractContextManager[None]]]:
    """Return the model's own logits, and what limits it to the layers that they come from."""
    if not needs_check(hf_model):
        return None, nullcontext
    # On CUDA the steps may be recorded with all layers.
    checked = FirstLayers.of(hf_model).alone if load.device.type == "cpu" else nullcontext
    with checked():
        return take_reference(hf_model), checked


def _dropping_pages(load: LoadJob, files: MappedFiles, stage: str) -> Callable[[float], None]:
    def report(share: float) -> None:
        files.drop_pages()  # otherwise memory would hold every weight twice, as read and as packed
        load.report(stage, share)

    return report


def _decoder(
    load: LoadJob,
    hf_model: Any,
    weights: ModuleWeights,
    layer: PredictionLayer | None,
    calls: list[AttentionCall],
    report: Callable[[float], None],
) -> Decoder:
    """Pack the modules' weights where there are kernels, and return what runs them."""
    packing, group = load.packing, load.group
    if packing is not None:
        pack_modules(hf_model, weights, packing, report)
    if group is not None and group.share.context_size > 1:
        return ContextDecoder(hf_model, weights, packing, group)
    if load.device.type == CUDA and not any(call.sinks is not None for call in calls):
        # Triton's kernels know no sinks.
        use_graphs = load.settings.cuda_graphs and group is None
        return make_cuda_decoder(hf_model, load.device, max_context=load.max_model_len, use_graphs=use_graphs)
    advice = "; compare config.json with the one the checkpoint was published with"
    with ForeignCode(f"can't run {type(hf_model).__name__}", advice):
        if layer is None:
            return ModuleDecoder(hf_model, weights, packing)
        main = StatesOfModules(hf_model, weights, packing)
    if packing is not None:
        pack_modules(layer, ModuleWeights(layer, {}), packing)
    return PredictingDecoder(main, layer, None if packing is None else packing.kernels, main.operations)
