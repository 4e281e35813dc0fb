"""Adapters that PEFT writes, with random matrices, and PEFT's own answers with them merged."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
STD = 0.1


def build_adapter(
    checkpoint: Path,
    path: Path,
    targets: Sequence[str] | str = (*ATTENTION, *GATED),
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: int = 8,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter for the model in `checkpoint`; `config`: other fields of `LoraConfig`."""
    from peft import LoraConfig, get_peft_model

    target_modules = targets if isinstance(targets, str) else list(targets)
    made = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_modules, lora_dropout=0.0, **config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), made)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * STD
        model.to(dtype).save_pretrained(str(path))
    return path


def write_adapter(
    path: Path, matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]], **config: Any
) -> Path:
    """Write an adapter's files without PEFT: ``layer -> (lora_A, lora_B)``; `config`: its fields."""
    path.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.rsplit(".", 1)[-1] for name in matrices})
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "bias": "none", "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(fields | config))
    tensors = {}
    for name, pair in matrices.items():
        for half, matrix in zip("AB", pair, strict=True):
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = matrix.contiguous()
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def merged_logits(
    checkpoint: Path, adapter: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Logits [T, vocab] float32 of the model that PEFT merges, run by transformers without a cache."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload().to(dtype).eval()
    with torch.inference_mode():
        logits: torch.Tensor = merged(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()
