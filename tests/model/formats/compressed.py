"""Weights compressed by the library compressed-tensors."""

from __future__ import annotations

import json
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from tests.quantized_files import Quantize, Tensors

INT8_INPUTS: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def compressed(
    weights: dict[str, Any], inputs: dict[str, Any] | None, kind: str
) -> tuple[Quantize, dict[str, Any]]:
    """Return the library's own compression, its decompression as numbers, and the config."""
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=QuantizationArgs(**inputs) if inputs else None,
    )
    args = scheme.weights
    assert args is not None

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group = args.group_size if args.strategy == "group" else weight.shape[1]
        grouped = weight.view(weight.shape[0], -1, group)
        if args.strategy == "tensor":
            grouped = weight.reshape(1, 1, -1)
        if args.strategy == "block":
            grouped = weight.view(-1, 16, weight.shape[1] // 32, 32).transpose(1, 2).flatten(2)
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(kind)
        stored = compressor.compress(state, scheme)
        numbers = compressor.decompress(dict(stored), scheme)["weight"]
        if inputs and not inputs["dynamic"]:
            stored["input_scale"] = torch.tensor([0.05])
            stored["input_zero_point"] = torch.tensor([-3], dtype=torch.int8)
        return stored, numbers.float()

    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    return quantize, {"quantization_config": config}


W8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
STATIC_INPUTS = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
