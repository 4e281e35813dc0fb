"""MXFP4 as OpenAI publishes GPT-OSS: experts as codes of 4 bits, 32 of which share an exponent of two.

The file stacks a layer's experts, with gates and ups by turns: codes uint8 [experts, outputs, groups, 16],
two a byte, and exponents uint8 [experts, outputs, groups]. Here each expert's gate, up and down are weights
of their own. The format is OCP's Microscaling (MX) 1.0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from stemma.errors import ModelError
from stemma.model.formats.checkpoint import CheckpointTensors, ReadWeights
from stemma.model.formats.summary import FormatCounts
from stemma.model.weights.fields import Field, PackedFields
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from stemma.model.weights.stored import StoredWeights

MXFP4_LEVELS = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""What codes stand for, doubled: numbers of one bit of mantissa and two of exponent."""
_GROUP = 32
_NOT_A_NUMBER = 255
_PARTS: dict[str, tuple[tuple[str, slice], ...]] = {
    "gate_up_proj": (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))),
    "down_proj": (("down_proj", slice(None)),),
}
"""What is stacked -> weights of an expert, and their rows."""


def mxfp4_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return scales of doubled levels, float32, of biased exponents, uint8; the least two are subnormal."""
    exponents = exponents.int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp_max(1), (exponents - 1) << 23)
    return bits.view(torch.float32)


def read_weights(
    tensors: CheckpointTensors, _quantization: dict[str, Any], dtype: torch.dtype
) -> tuple[StoredWeights, FormatCounts]:
    """Return all weights by name; those of experts stay quantized.

    Raises ModelError naming a tensor whose parts are missing or don't fit.
    """
    read = ReadWeights(tensors, dtype)
    for stem in list(tensors.stems("_blocks")):
        module, _, name = stem.rpartition(".")
        parts = _PARTS.get(name)
        if parts is None:
            raise ModelError(f"{tensors.path}: {stem}_blocks are MXFP4 of a layer that no GPT-OSS has")
        count, outputs, inputs = _checked_shape(tensors, stem)
        for expert in range(count):
            for part, rows in parts:
                make = partial(_weight, tensors, stem, expert, rows)
                shape = torch.Size((len(range(outputs)[rows]), inputs))
                read.add_checked(f"{module}.{expert}.{part}.weight", shape, make, "MXFP4")
        read.take(f"{stem}_blocks", f"{stem}_scales")
    return read.finish()


def _checked_shape(tensors: CheckpointTensors, stem: str) -> tuple[int, int, int]:
    """Return experts, outputs and inputs. Raises ModelError if codes and exponents don't fit each other."""
    blocks = tensors.stored[f"{stem}_blocks"]
    shape = blocks.shape
    if len(shape) != 4 or shape[3] != _GROUP // 2 or 0 in shape or blocks.dtype != "U8":
        raise ModelError(
            f"{tensors.path}: {stem}_blocks are {blocks.dtype} {list(shape)}, must be U8 [experts, outputs, "
            f"groups, {_GROUP // 2}]"
        )
    exponents = tensors.read_shape(f"{stem}_scales", shape[:3], (torch.uint8,))
    if bool((exponents == _NOT_A_NUMBER).any()):
        raise ModelError(f"{tensors.path}: {stem}_scales have one that is no number; download the file again")
    return shape[0], shape[1], shape[2] * _GROUP


def _weight(tensors: CheckpointTensors, stem: str, expert: int, rows: slice) -> QuantizedWeight:
    blocks = tensors.read_part(f"{stem}_blocks", expert)[rows].contiguous()
    exponents = tensors.read_part(f"{stem}_scales", expert)[rows]
    return QuantizedWeight(
        codes=PackedFields(blocks, Field(0, blocks.shape[2], 4, 1)),
        scales=mxfp4_scales(exponents),
        zero_points=None,
        bits=4,
        group_size=_GROUP,
        activations=ActivationScheme.NONE,
        is_unsigned=True,
        levels=MXFP4_LEVELS,
    )
