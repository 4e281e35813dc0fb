"""Checkpoints of `compressed-tensors`, what llm-compressor writes: int8 and int4 weights, FP8.

The library reads the scheme in config.json and unpacks codes. Weights in FP8 are dequantized. Inputs are
quantized as the scheme says where it says int8, per token or by one scale of the file; all other schemes for
inputs only lose precision here, so inputs stay as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_name

from stemma.errors import ModelError, UnsupportedModel
from stemma.foreign_code import ForeignCode
from stemma.model.formats.checkpoint import (
    PER_TOKEN,
    UNQUANTIZED,
    Activations,
    CheckpointTensors,
    ReadWeights,
    make_weight,
    static_activations,
)
from stemma.model.formats.fp8 import coded_floats
from stemma.model.formats.permuted import dequantize_permuted, permuted_groups
from stemma.model.formats.summary import FormatCounts
from stemma.model.weights.fields import Codes, fields_of_words
from stemma.model.weights.quantized import QuantizedWeight
from stemma.model.weights.stored import StoredWeights

_READ = (
    "Read are int weights of up to 8 bits and FP8, in pack-quantized, int-, float- and naive-quantized files"
)
_FORMATS = frozenset(
    {"dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"}
)
_KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".output_scale")
"""Numbers for a quantized KV cache; ours has its own."""


def read_weights(
    tensors: CheckpointTensors, quantization: dict[str, Any], dtype: torch.dtype
) -> tuple[StoredWeights, FormatCounts]:
    """Return all weights. Raises ModelError for what contradicts itself, UnsupportedModel for other
    formats."""
    config = _parse(tensors, quantization)
    read = ReadWeights(tensors, dtype)
    for stem in tensors.stems(".weight_packed"):
        _add_integer(read, stem, _scheme_of(tensors, config, stem), packed=True)
    for stem in tensors.stems(".weight_scale"):
        if f"{stem}.weight_packed" not in tensors:
            _add_stored(read, stem, _scheme_of(tensors, config, stem))
    for name in tensors.stored:
        if name.endswith(_KV_SCALES):
            read.take(name)
    return read.finish()


def _parse(tensors: CheckpointTensors, quantization: dict[str, Any]) -> QuantizationConfig:
    sparsity = quantization.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format") not in (None, "dense"):
        raise UnsupportedModel(f"{tensors.path} has weights in the sparse format {sparsity!r:.80}. {_READ}")
    if quantization.get("transform_config"):
        raise UnsupportedModel(f"{tensors.path} rotates activations (transform_config). {_READ}")
    known = {name: value for name, value in quantization.items() if name in QuantizationConfig.model_fields}
    with ForeignCode(f"{tensors.path} has a quantization_config that compressed-tensors doesn't read"):
        config = QuantizationConfig.model_validate(known)
    named = {config.format, *(scheme.format for scheme in config.config_groups.values())} - {None}
    if other := sorted(str(name) for name in named if name not in _FORMATS):
        raise UnsupportedModel(f"{tensors.path} is in the format {', '.join(other)}. {_READ}")
    return config


def _scheme_of(tensors: CheckpointTensors, config: QuantizationConfig, stem: str) -> QuantizationScheme:
    """Return the scheme whose targets name the module, else the one for its class, which is Linear."""
    groups = list(config.config_groups.values())
    for scheme in groups:
        if any(match_name(stem, target) for target in scheme.targets):
            return scheme
    for scheme in groups:
        if "Linear" in scheme.targets:
            return scheme
    raise ModelError(f"{tensors.path}: no group of quantization_config is for {stem}, which is quantized")


def _weight_args(tensors: CheckpointTensors, stem: str, scheme: QuantizationScheme) -> QuantizationArgs:
    if scheme.weights is None:
        raise ModelError(f"{tensors.path}: quantization_config leaves {stem} as it is, the file quantizes it")
    if scheme.output_activations is not None:
        raise UnsupportedModel(f"{tensors.path} quantizes outputs (of {stem}). {_READ}")
    return scheme.weights


def _add_stored(read: ReadWeights, stem: str, scheme: QuantizationScheme) -> None:
    """Add a weight whose codes are stored one by one: int8, or FP8."""
    tensors = read.tensors
    args = _weight_args(tensors, stem, scheme)
    if args.type == "int":
        _add_integer(read, stem, scheme, packed=False)
        return
    if args.num_bits != 8 or args.strategy not in ("tensor", "channel", "block"):
        raise UnsupportedModel(
            f"{tensors.path}: {stem} is {args.type} of {args.num_bits} bits by {args.strategy}. {_READ}"
        )
    codes = tensors.read(f"{stem}.weight", (torch.float8_e4m3fn, torch.float8_e5m2))
    block = None
    if args.strategy == "block" and args.block_structure is not None:
        block = args.block_structure[0], args.block_structure[1]
    scale = tensors.read(f"{stem}.weight_scale")
    weight = coded_floats(tensors.path, f"{stem}.weight", codes, scale, block, read.dtype)
    read.add_floats(f"{stem}.weight", weight, "FP8")
    read.take(*(f"{stem}.{part}" for part in ("weight", "weight_scale", "input_scale", "input_zero_point")))


def _add_integer(read: ReadWeights, stem: str, scheme: QuantizationScheme, *, packed: bool) -> None:
    tensors = read.tensors
    args = _weight_args(tensors, stem, scheme)
    if (
        args.type != "int"
        or not 1 <= args.num_bits <= 8
        or args.strategy not in ("tensor", "channel", "group")
    ):
        raise UnsupportedModel(
            f"{tensors.path}: {stem} is {args.type} of {args.num_bits} bits by {args.strategy}. {_READ}"
        )
    activations, inputs = _activations(tensors, stem, scheme.input_activations)
    make = partial(_weight, tensors, stem, args, activations, packed)
    label = f"W{args.num_bits}{inputs}"
    order = None
    if f"{stem}.weight_g_idx" in tensors:
        weight = make()
        order = _group_order(tensors, stem, weight)
    if order is not None:
        read.add_plain(f"{stem}.weight", dequantize_permuted(weight, order), f"{label} with permuted groups")
    else:
        read.add(f"{stem}.weight", make, label)
    parts = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    read.take(*(f"{stem}.{part}" for part in (*parts, "input_scale", "input_zero_point")))


def _weight(
    tensors: CheckpointTensors, stem: str, args: QuantizationArgs, activations: Activations, packed: bool
) -> QuantizedWeight:
    where = f"{tensors.path}: {stem}.weight"
    codes = (
        _unpacked(tensors, stem, args.num_bits) if packed else tensors.read(f"{stem}.weight", (torch.int8,))
    )
    scales = tensors.read_floats(f"{stem}.weight_scale")
    zero_points = None if args.symmetric else _zero_points(tensors, stem, args.num_bits, codes, scales)
    return make_weight(where, codes, scales, zero_points, args.num_bits, activations)


def _unpacked(tensors: CheckpointTensors, stem: str, bits: int) -> Codes:
    packed = tensors.read(f"{stem}.weight_packed", (torch.int32,))
    shape = tensors.read_shape(f"{stem}.weight_shape", (2,), (torch.int64, torch.int32)).tolist()
    if packed.dim() != 2 or shape[0] != packed.shape[0] or packed.shape[1] != -(-shape[1] * bits // 32):
        raise ModelError(
            f"{tensors.path}: {stem}.weight_packed {list(packed.shape)} isn't a weight {shape} of {bits} bits"
        )
    if bits in (4, 8) and shape[1] * bits % 32 == 0:
        return fields_of_words(packed, bits)
    codes: torch.Tensor = unpack_from_int32(packed, bits, torch.Size(shape))
    return codes


def _zero_points(
    tensors: CheckpointTensors, stem: str, bits: int, codes: Codes, scales: torch.Tensor
) -> torch.Tensor | None:
    name = f"{stem}.weight_zero_point"
    if name not in tensors:
        return None
    stored = tensors.read(name, (torch.int8, torch.int32))
    if stored.dtype == torch.int8:
        return stored
    shape = (codes.shape[0], scales.shape[-1] if scales.dim() == 2 else 1)
    if tuple(stored.shape) != (-(-shape[0] * bits // 32), shape[1]):
        raise ModelError(f"{tensors.path}: {name} {list(stored.shape)} isn't {list(shape)} of {bits} bits")
    zero_points: torch.Tensor = unpack_from_int32(stored, bits, torch.Size(shape), packed_dim=0)
    return zero_points


def _activations(
    tensors: CheckpointTensors, stem: str, args: QuantizationArgs | None
) -> tuple[Activations, str]:
    """Return what becomes of the inputs, and its short name."""
    if args is None or args.type != "int" or args.num_bits != 8:
        return UNQUANTIZED, "A16"
    if args.dynamic is True and args.strategy == "token" and args.symmetric:
        return PER_TOKEN, "A8 per token"
    if args.dynamic is False and args.strategy == "tensor":
        zero = None if args.symmetric else f"{stem}.input_zero_point"
        return static_activations(tensors, f"{stem}.input_scale", zero), "A8 static"
    return UNQUANTIZED, "A16"


def _group_order(tensors: CheckpointTensors, stem: str, weight: QuantizedWeight) -> torch.Tensor | None:
    """Return the group of each input if groups aren't runs of inputs, else None."""
    groups = tensors.read_shape(f"{stem}.weight_g_idx", (weight.shape[1],), (torch.int32, torch.int64)).long()
    return permuted_groups(f"{tensors.path}: {stem}.weight_g_idx", groups, weight.scales.shape[1])
