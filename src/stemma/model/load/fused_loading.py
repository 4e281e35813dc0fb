"""From a checkpoint to a fused decoder, if the native step computes all that it holds. No module is made."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TypeGuard

import torch

from stemma.foreign_code import ForeignCode
from stemma.model.cpu.fused import FusedDecoder, PackedWeights, pack_weights
from stemma.model.cpu.heads import kv_shape_of
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weight_memory import weights_together
from stemma.model.families.layout import ModelLayout
from stemma.model.families.prediction import is_prediction
from stemma.model.families.registry import contained_layout, family_of
from stemma.model.files.directory import weight_files
from stemma.model.foreign.loading import model_class
from stemma.model.foreign.packing import pack_modules
from stemma.model.foreign.rowwise import RowwiseOperations
from stemma.model.foreign.weights import ModuleWeights
from stemma.model.formats.weight_check import check_finite, check_weights
from stemma.model.load.job import Loaded, LoadJob
from stemma.model.load.prediction import (
    PredictingDecoder,
    PredictionLayer,
    read_prediction_layer,
    with_prediction,
)
from stemma.model.opened.checkpoint import DecoderParts
from stemma.model.opened.checkpoint_config import SCORE_WEIGHT, is_classifier
from stemma.model.weights.named import NamedWeights, Weight
from stemma.native.process_memory import MappedFiles, large_blocks_apart

_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$|^mtp\.")
"""Old checkpoints hold what the config says of angles; Qwen's have a layer that guesses tokens."""


def fitting_layout(checkpoint: DecoderParts) -> ModelLayout | None:
    """Return what the config makes, if the native step computes it and the checkpoint holds just that.

    Raises ModelError for a config that makes no model.
    """
    if not checkpoint.is_readable or checkpoint.has_whole_images:
        return None
    shapes = checkpoint.shapes()
    advice = "; compare config.json with the one the checkpoint was published with"
    with ForeignCode(f"can't load {checkpoint.path}", advice):  # a config may hold anything
        layout = contained_layout(checkpoint.config, checkpoint.dtype, shapes)
    if layout is None:
        return None
    surplus = shapes.keys() - layout.shapes().keys()
    weights = checkpoint.weights() if surplus else {}
    fits = all(_may_be_left(name, checkpoint, layout, weights) for name in surplus)
    return layout if fits else None


def named_weights(checkpoint: DecoderParts) -> NamedWeights:
    """Return the checkpoint's weights as a decoder takes them. Its methods raise ModelError."""
    return NamedWeights(checkpoint.weights(), checkpoint.dtype, partial(check_finite, checkpoint.path))


def load_fused(load: LoadJob, layout: ModelLayout) -> Loaded:
    """Return a decoder of all weights; those that the load's plan has packed of the same files are taken.

    Raises ModelError if a weight isn't finite.
    """
    packing, dtype = load.packing, load.checkpoint.dtype
    assert packing is not None
    layer = _prediction_layer(load)
    packed = _take_packed(load)
    if packed is None:
        packed = _pack(load, layout, packing)
    else:
        packing.saved_bytes += packed.saved_bytes
    main = FusedDecoder(layout, packed, packing, dtype)
    kv_shape = kv_shape_of(layout)
    family = family_of(load.checkpoint.config.model_type)
    assert family is not None
    num_bytes = sum(math.prod(shape) for shape in layout.shapes().values()) * dtype.itemsize
    loaded = Loaded(main, kv_shape, family.architecture, num_bytes, len(load.checkpoint.codes))
    if layer is None:
        return loaded
    check_weights(layer, load.checkpoint.path, lambda _share: None)
    num_bytes += sum(parameter.nbytes for parameter in layer.parameters())
    pack_modules(layer, ModuleWeights(layer, {}), packing)
    decoder = PredictingDecoder(main, layer, packing.kernels, RowwiseOperations(packing.kernels))
    more = with_prediction(kv_shape, decoder.hidden_size)
    return replace(loaded, decoder=decoder, kv_shape=more, num_bytes=num_bytes)


def _prediction_layer(load: LoadJob) -> PredictionLayer | None:
    if not load.predicts:
        return None
    weights = named_weights(load.checkpoint)
    return read_prediction_layer(load.checkpoint, model_class(load.checkpoint.config), weights.tensor)


def _take_packed(load: LoadJob) -> PackedWeights | None:
    checkpoint, plan = load.checkpoint, load.plan
    if plan is None:
        return None
    packed = None
    if plan.packing is not None and load.settings.quantize == "none" and checkpoint.quantized is None:
        is_tied = bool(checkpoint.config.tie_word_embeddings)
        packed = plan.packing.take(
            checkpoint.stored, checkpoint.dtype, is_tied=is_tied, isa=load.settings.isa
        )
    plan.drop_packed()
    return packed


def _pack(load: LoadJob, layout: ModelLayout, packing: Packing) -> PackedWeights:
    weights = named_weights(load.checkpoint)
    files = MappedFiles(weight_files(load.checkpoint.path))

    def dropping_pages(share: float) -> None:
        files.drop_pages()  # otherwise memory would hold every weight twice, as read and as packed
        load.report("packing weights", share)

    memory = None if load.plan is None else load.plan.take_memory()
    with large_blocks_apart(), weights_together(memory):
        return pack_weights(layout, weights, packing, dropping_pages)


def _may_be_left(
    name: str, checkpoint: DecoderParts, layout: ModelLayout, weights: Mapping[str, Weight]
) -> bool:
    """Whether a tensor that the layout doesn't have means nothing, or nothing new."""
    if _IGNORED.search(name) or is_prediction(name, checkpoint.config):
        return True
    if name == SCORE_WEIGHT and is_classifier(checkpoint.config):
        return True
    weight = weights[name]
    if checkpoint.quantized is not None and name.endswith(".bias"):
        return _is_plain(weight) and not bool(weight.any())  # some quantizers write them
    if layout.head is not None or name != "lm_head.weight":
        return False
    embedding = weights[f"{layout.embedding.name}.weight"]
    return _is_plain(weight) and _is_plain(embedding) and torch.equal(weight, embedding)


def _is_plain(weight: Weight) -> TypeGuard[torch.Tensor]:
    return isinstance(weight, torch.Tensor)
