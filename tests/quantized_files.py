"""Tiny quantized checkpoints, each beside the plain one that it stands for.

`rewrite` takes a checkpoint apart: a function turns each linear weight into the tensors of a format and the
numbers that these stand for. Packing is written out here in the plainest way, apart from what the readers do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A weight -> its tensors by last name, and its plain numbers."""


@dataclass(frozen=True)
class Twin:
    """A quantized checkpoint and its plain one."""

    quantized: Path
    plain: Path

    def numbers(self) -> Tensors:
        return load_file(self.plain / "model.safetensors")


def rewrite(
    folder: Path,
    quantize: Quantize,
    config: dict[str, Any],
    *,
    family: str = "llama",
    file: str = "model.safetensors",
) -> Twin:
    """Write `quantized/` and `plain/` into `folder`; `config` is added to config.json of the first."""
    plain = checkpoints.build(family, folder / "plain")
    quantized = checkpoints.build(family, folder / "quantized")
    numbers = quantize_in_place(quantized, quantize, config, file=file)
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    return Twin(quantized, plain)


def quantize_in_place(
    checkpoint: Path, quantize: Quantize, config: dict[str, Any], *, file: str = "model.safetensors"
) -> Tensors:
    """Replace the linear weights of a plain checkpoint; return the numbers that all tensors stand for."""
    weights = load_file(checkpoint / "model.safetensors")
    stored, numbers = dict(weights), dict(weights)
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix(".weight")
            tensors, numbers[name] = quantize(weight)
            del stored[name]
            stored |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    (checkpoint / "model.safetensors").unlink()
    save_file(stored, checkpoint / file, metadata={"format": "pt"})
    written = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(written | config))
    return numbers


def edit(path: Path, change: Callable[[Tensors], object], file: str = "model.safetensors") -> None:
    weights = load_file(path / file)
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / file)


def round_to(weight: torch.Tensor, bits: int, group: int, *, zero: bool) -> tuple[torch.Tensor, ...]:
    """Return unsigned codes int32 [o, i], scales and zero points [o, groups], and the numbers [o, i]."""
    grouped = weight.view(weight.shape[0], -1, group)
    top = 2**bits - 1
    if zero:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / top).half().float()
        zeros = (-low / scales).round().clamp(0, top).int()
    else:
        scales = (grouped.abs().amax(-1) / (2 ** (bits - 1))).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1)).int()
    codes = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(0, top).int()
    numbers = (codes - zeros[..., None]) * scales[..., None]
    return codes.view(weight.shape), scales, zeros, numbers.view(weight.shape)


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned codes [n, m] along the first dimension, lowest bits first, into int32 [n * bits / 32,
    m]."""
    flat = [sum(int(code) << (bits * row) for row, code in enumerate(column.tolist())) for column in codes.T]
    words = codes.shape[0] * bits // 32
    packed = [[(value >> (32 * word)) & 0xFFFFFFFF for value in flat] for word in range(words)]
    return torch.tensor(packed, dtype=torch.int64).to(torch.int32)


def less_ones(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Subtract 1 from each field, as GPTQModel does: from words; a 0 borrows from the field above it."""
    offsets = {
        2: [0x55555555],
        3: [0x49249249, 0x92492492, 0x24924924],
        4: [0x11111111],
        8: [0x01010101],
    }[bits]
    rows = [
        [((word & 0xFFFFFFFF) - offsets[place % len(offsets)]) & 0xFFFFFFFF for place, word in enumerate(row)]
        for row in words.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def gptq(bits: int, group: int, *, zero: bool, added: int = 1, order: torch.Tensor | None = None) -> Quantize:
    """GPTQ, version 1 (`added` 1) or 2 (0); `order` permutes inputs before they form groups."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        permutation = (
            torch.arange(inputs)
            if order is None
            else torch.randperm(inputs, generator=torch.Generator().manual_seed(5))
        )
        codes, scales, zeros, numbers = round_to(weight[:, permutation], bits, group, zero=zero)
        back = torch.argsort(permutation)
        tensors = {
            "qweight": pack_rows(codes[:, back].T, bits),
            "qzeros": less_ones(pack_rows(zeros, bits).T, bits) if added else pack_rows(zeros, bits).T,
            "scales": scales.T.half(),
            "g_idx": (back // group).int(),
        }
        return tensors, numbers[:, back]

    return quantize


def awq(group: int) -> Quantize:
    """AWQ's gemm layout: eight outputs to a word, in its order."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(codes: torch.Tensor) -> torch.Tensor:
        fields = codes.view(codes.shape[0], -1, 8)[..., list(order)]
        return torch.stack([pack_rows(row.T, 4)[0] for row in fields])

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, numbers = round_to(weight, 4, group, zero=True)
        tensors = {"qweight": pack(codes.T), "qzeros": pack(zeros.T), "scales": scales.T.half()}
        return tensors, numbers

    return quantize


def int8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes int8, scales [o, 1] and numbers, symmetric."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return codes, scales, codes * scales
