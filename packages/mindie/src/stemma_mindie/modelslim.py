"""Checkpoints of msModelSlim, the quantizer of MindIE and Ascend.

Beside the safetensors lies `quant_model_description*.json`, which names the format of each tensor:

| format | weight | inputs |
|---|---|---|
| FLOAT, W16A16S | as it is; of S, parts are zero | as they are |
| W8A16, W4A16 | codes, `weight_scale`, `weight_offset` | as they are |
| W8A8_DYNAMIC, W4A8_DYNAMIC | as above; W4A8 may have a second scale for each group | int8 per token |
| W8A8, W8A8S | codes; `deq_scale` is the scale times that of the inputs; `quant_bias` | int8 by
`input_scale`, `input_offset` | | W8A8_MIX (PDMIX) | codes, `weight_scale` and all of W8A8 | int8 per token |

PDMIX computes a prompt with inputs quantized per token, and generated tokens by one scale. Here all tokens
are quantized per token: the KV of a token must not depend on whether it was read or generated, or it could
not be reused.

Offsets here are zero points: value = (code - weight_offset) * weight_scale. Codes of 4 bits lie one or two to
a byte, two along the outputs, the even one in the low bits. `quant_bias` holds the bias over `deq_scale`,
less the offset of the inputs times the sum of the codes. Sources: msModelSlim's `quantized_weight_format.md`
and `ascendv1.md`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.formats.checkpoint import (
    PER_TOKEN,
    UNQUANTIZED,
    Activations,
    CheckpointTensors,
    ReadWeights,
    make_weight,
    static_activations,
)
from stemma.model.formats.summary import FormatCounts
from stemma.model.weights.quantized import QuantizedWeight
from stemma.model.weights.stored import StoredWeights

_PLAIN = ("FLOAT", "W16A16S")
_STATIC = ("W8A8", "W8A8S")
_WEIGHTS = {
    "W8A16": (8, UNQUANTIZED),
    "W4A16": (4, UNQUANTIZED),
    "W8A8_DYNAMIC": (8, PER_TOKEN),
    "W8A8_MIX": (8, PER_TOKEN),
    "W4A8_DYNAMIC": (4, PER_TOKEN),
}
"""Format -> bits and what is done to inputs, of those with a scale of the weight alone."""
_READ = f"Read are {', '.join((*_PLAIN, *_STATIC, *_WEIGHTS))}"
_PARTS = (
    *("weight", "weight_scale", "weight_offset", "weight_scale_second", "weight_offset_second", "scale_bias"),
    *("input_scale", "input_offset", "quant_bias", "deq_scale"),
)
_NOT_NEEDED = re.compile(r"\.(kv_cache_scale|kv_cache_offset|fa_[qkv]\.(scale|offset))$")
"""Numbers for quantized KV and attention; ours are not."""
_SMOOTHED = ".module.weight"
"""A norm's weight as the quantized modules behind it need it; plain modules need the one without `module`."""
_BEHIND = {"input_layernorm": "self_attn.", "post_attention_layernorm": "mlp."}


def read_weights(
    tensors: CheckpointTensors, description: dict[str, Any], dtype: torch.dtype
) -> tuple[StoredWeights, FormatCounts]:
    """Return all weights; `description` is the content of the description file.

    Raises ModelError for what contradicts itself, UnsupportedModel for formats that aren't read, by name.
    """
    read = ReadWeights(tensors, dtype)
    for name in tensors.stored:
        kind = description.get(name, "FLOAT")
        if _NOT_NEEDED.search(name):
            read.take(name)
        elif kind in _PLAIN:
            continue
        elif kind not in _STATIC and kind not in _WEIGHTS:
            raise UnsupportedModel(f"{tensors.path}: {name} is {str(kind)[:40]}, which isn't read. {_READ}")
        elif name.endswith(".weight") and not name.endswith(_SMOOTHED) and _is_quantized(tensors, name):
            _add(read, name.removesuffix(".weight"), str(kind), dtype)
    _take_smoothed(read, description)
    return read.finish()


def _is_quantized(tensors: CheckpointTensors, name: str) -> bool:
    """Whether a tensor holds codes; norms are listed with the format of the modules behind them."""
    return tensors.stored[name].dtype == "I8"


def _add(read: ReadWeights, stem: str, kind: str, dtype: torch.dtype) -> None:
    tensors = read.tensors
    if kind in _STATIC:
        make = partial(_static, tensors, stem)
        _add_bias(read, stem, dtype)
    else:
        bits, activations = _WEIGHTS[kind]
        make = partial(_scaled, tensors, stem, bits, activations)
    read.add(f"{stem}.weight", make, "W8A8_MIX with inputs per token" if kind == "W8A8_MIX" else kind)
    read.take(*(f"{stem}.{part}" for part in _PARTS))


def _scaled(tensors: CheckpointTensors, stem: str, bits: int, activations: Activations) -> QuantizedWeight:
    """Return a weight with scales of its own: of outputs, or of groups, or of both."""
    where = f"{tensors.path}: {stem}.weight"
    scales = tensors.read_floats(f"{stem}.weight_scale")
    scales = scales[:, None] if scales.dim() == 1 else scales
    codes = tensors.read(f"{stem}.weight", (torch.int8,))
    if bits == 4 and codes.dim() == 2 and codes.shape[0] * 2 == scales.shape[0]:
        codes = _unpacked(codes)
    offsets = _offsets(tensors, f"{stem}.weight_offset", scales)
    if f"{stem}.weight_scale_second" in tensors:
        second = tensors.read_floats(f"{stem}.weight_scale_second")
        if scales.shape[1] != 1 or second.dim() != 2 or second.shape[0] != scales.shape[0]:
            raise ModelError(f"{where} has scales {list(scales.shape)} and second ones {list(second.shape)}")
        if offsets is not None or _offsets(tensors, f"{stem}.weight_offset_second", second) is not None:
            raise UnsupportedModel(f"{where} has two scales and offsets; read are symmetric ones")
        scales = scales * second
    return make_weight(where, codes, scales, offsets, bits, activations)


def _offsets(tensors: CheckpointTensors, name: str, scales: torch.Tensor) -> torch.Tensor | None:
    """Return zero points as whole numbers in the shape of scales; None: there are none, or all are zero."""
    if name not in tensors:
        return None
    offsets = tensors.read(name).float()
    if offsets.numel() != scales.numel() or not bool((offsets == offsets.round()).all()):
        raise ModelError(f"{tensors.path}: {name} {list(offsets.shape)} must be whole numbers, one a scale")
    return offsets.reshape(scales.shape).int() if bool(offsets.any()) else None


def _static(tensors: CheckpointTensors, stem: str) -> QuantizedWeight:
    """Return a weight whose inputs are quantized by one scale of the file."""
    activations = _static_inputs(tensors, stem)
    assert activations.scale is not None
    codes, deq_scale = _static_parts(tensors, stem)
    where = f"{tensors.path}: {stem}.weight"
    return make_weight(where, codes, deq_scale / activations.scale, None, 8, activations)


def _static_inputs(tensors: CheckpointTensors, stem: str) -> Activations:
    return static_activations(tensors, f"{stem}.input_scale", f"{stem}.input_offset")


def _static_parts(tensors: CheckpointTensors, stem: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [outputs, inputs] and what turns sums of products into outputs, float32 [outputs]."""
    codes = tensors.read(f"{stem}.weight", (torch.int8,))
    if codes.dim() != 2:
        raise ModelError(f"{tensors.path}: {stem}.weight is {list(codes.shape)}, must be [outputs, inputs]")
    shape = (codes.shape[0],)
    deq_scale = tensors.read_shape(f"{stem}.deq_scale", shape, (torch.float32, torch.int64, torch.uint64))
    if deq_scale.dtype != torch.float32:  # for float16 models the bits of a float32 lie in an int64
        deq_scale = deq_scale.to(torch.int64).to(torch.int32).view(torch.float32)
    tensors.check_finite(f"{stem}.deq_scale", deq_scale)
    return codes, deq_scale


def _add_bias(read: ReadWeights, stem: str, dtype: torch.dtype) -> None:
    """Add the bias that is stored in units of the sums, where there is one."""
    tensors = read.tensors
    if f"{stem}.bias" in tensors:
        return
    codes, deq_scale = _static_parts(tensors, stem)
    stored = tensors.read_shape(f"{stem}.quant_bias", deq_scale.shape, (torch.int32,))
    bias = stored.long() + _static_inputs(tensors, stem).zero_point * codes.long().sum(dim=1)
    if bool(bias.any()):
        read.weights[f"{stem}.bias"] = (bias * deq_scale.double()).to(dtype)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return codes int8 [2 n, inputs] of bytes [n, inputs]: output 2 i in the low bits of byte i, signed."""
    low, high = (packed << 4) >> 4, packed >> 4
    return torch.stack([low, high], dim=1).flatten(0, 1)


def _take_smoothed(read: ReadWeights, description: dict[str, Any]) -> None:
    """Choose between the two weights that outlier suppression leaves a norm; refuse its bias, if it has
    one."""
    tensors = read.tensors
    for stem in list(tensors.stems(_SMOOTHED)):
        bias = f"{stem}.module.bias"
        if bias in tensors and bool(tensors.read(bias).any()):
            raise UnsupportedModel(
                f"{tensors.path}: {stem} has a bias from outlier suppression, which no norm of the model "
                "adds; "
                "quantize again without it (anti_method m4 or none), or take the unquantized checkpoint"
            )
        layer, _, norm = stem.rpartition(".")
        behind = f"{layer}.{_BEHIND.get(norm, '')}"
        is_used = any(
            name.startswith(behind) and name.endswith(".weight") and kind not in _PLAIN
            for name, kind in description.items()
        )
        if is_used or f"{stem}.weight" not in tensors:
            read.weights[f"{stem}.weight"] = tensors.read(f"{stem}{_SMOOTHED}")
        read.take(f"{stem}{_SMOOTHED}", bias)
