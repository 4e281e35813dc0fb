"""Checkpoints whose config or weights are changed; DeepSeek-V3 in FP8 beside its twin in plain numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints

Weights = dict[str, torch.Tensor]


def edit(path: Path, change: Callable[[Weights], None]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def configure(path: Path, file: str = "config.json", **fields: object) -> None:
    content = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**content, **fields}))


def fp8_checkpoint(
    path: Path, block: tuple[int, int] | None, build: Callable[[Path], Path] | None = None
) -> Path:
    """Write a DeepSeek-V3 whose kv_a has 40 rows in FP8, scales by block, and its twin in plain numbers."""
    (build or partial(checkpoints.build, "deepseek-v3"))(path / "fp8")
    shutil.copytree(path / "fp8", path / "plain")

    def quantize_all(weights: Weights, *, plain: bool) -> None:
        for name in [name for name in weights if name.endswith("_proj.weight") or "kv_a_proj" in name]:
            weight = weights[name]
            high, wide = block or weight.shape
            rows, columns = weight.shape
            scales = torch.rand(-(-rows // high), -(-columns // wide), generator=generator) + 0.5
            whole = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
            stored = (weight / whole).to(torch.float8_e4m3fn)
            if plain:
                weights[name] = stored.float() * whole
            else:
                weights[name] = stored
                weights[name + "_scale_inv"] = scales

    for twin in ("fp8", "plain"):
        generator = torch.Generator().manual_seed(1)
        edit(path / twin, partial(quantize_all, plain=twin == "plain"))
    quantization = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    configure(path / "fp8", quantization_config=quantization)
    return path
