"""GPT-OSS in MXFP4, as OpenAI publishes it, against transformers' own numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError
from stemma.model.load import loading
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from tests import checkpoints
from tests.model.paging import PagedSequences, plain_logits
from tests.native.isa import level_params

Tensors = dict[str, torch.Tensor]


def build(folder: Path, **changed: Any) -> tuple[Path, Path]:
    """Write a checkpoint in MXFP4, and its numbers in float32; `changed`: tensors of layer 0's experts."""
    plain = checkpoints.build("gpt-oss", folder / "plain")
    weights: Tensors = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    packed: Tensors = {}
    for name in list(weights):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, inputs, outputs = weights[name].shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=generator).byte()
        scales = torch.randint(114, 122, (count, outputs, inputs // 32), generator=generator).byte()
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for name, tensor in changed.items():
        packed[f"model.layers.0.mlp.experts.{name}"] = tensor
    rest = {name: tensor for name, tensor in weights.items() if f"{name}_blocks" not in packed}
    quantized = folder / "mxfp4"
    quantized.mkdir()
    for file in plain.iterdir():
        if file.name != "model.safetensors":
            (quantized / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (quantized / "config.json").write_text(json.dumps(config))
    save_file(rest | packed, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    return quantized, plain


def load(path: Path, dtype: str = "float32", isa: str = "auto") -> CausalLM:
    settings = {"path": path, "dtype": dtype, "device": "cpu", "isa": isa}
    return load_model(ModelSettings.model_validate(settings))


def logits_of(model: CausalLM, prompt: list[int], chunk: int) -> torch.Tensor:
    run = PagedSequences(model, [prompt])
    run.finish(chunk=chunk)
    return run.logits[0]


def test_equals_transformers(tmp_path: Path) -> None:
    quantized, plain = build(tmp_path)
    rng = random.Random(1)
    prompt = [rng.randrange(500) for _ in range(60)]
    model = load(quantized)
    assert "MXFP4 kept quantized" in model.info.formats
    found = logits_of(model, prompt, 17)
    torch.testing.assert_close(found, plain_logits(plain, prompt), atol=2e-4, rtol=1e-4)
    assert torch.equal(found, logits_of(model, prompt, 60))


@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_level_equals_transformers(dtype: str, isa: str, tmp_path: Path) -> None:
    """In bfloat16 but for one token: rounding decides between its experts (gap of their scores: 0.004)."""
    quantized, plain = build(tmp_path)
    prompt = list(range(60))
    model = load(quantized, dtype, isa)
    found = logits_of(model, prompt, 17)
    assert torch.equal(found, logits_of(model, prompt, 60))
    errors = (found - plain_logits(plain, prompt)).abs().amax(-1).sort().values
    assert errors[-1] < 2e-4 if dtype == "float32" else errors[-2] < 0.05


@pytest.mark.parametrize("kernels", [True, False])
def test_experts_become_plain_where_modules_run(
    kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, _ = build(tmp_path)
    prompt = list(range(40))
    fused = logits_of(load(quantized), prompt, 40)
    monkeypatch.setattr(loading, "fitting_layout", lambda _checkpoint: None)
    if not kernels:
        monkeypatch.setattr(loading, "load_kernels", lambda isa: None)
    torch.testing.assert_close(fused, logits_of(load(quantized), prompt, 40), atol=2e-4, rtol=1e-4)


def test_a_mixture_without_its_downs(tmp_path: Path) -> None:
    quantized, _ = build(tmp_path)
    file = quantized / "model.safetensors"
    weights = load_file(file)
    kept = {name: one for name, one in weights.items() if "layers.0.mlp.experts.down_proj_" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lack some of their gates, ups or downs"):
        load(quantized)


@pytest.mark.parametrize(("field", "value"), [("swiglu_alpha", 0.0), ("swiglu_limit", -1.0)])
def test_gates_that_the_kernels_dont_compute(field: str, value: Any, tmp_path: Path) -> None:
    """The modules compute them."""
    path = checkpoints.build("gpt-oss", tmp_path / "model", **{field: value})
    prompt = list(range(30))
    torch.testing.assert_close(
        logits_of(load(path), prompt, 30), plain_logits(path, prompt), atol=2e-4, rtol=1e-4
    )


BLOCKS = torch.zeros(4, 192, 2, 16, dtype=torch.uint8)
SCALES = torch.full((4, 192, 2), 120, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gate_up_proj_blocks": BLOCKS[..., :15].clone()}, "must be U8 \\[experts, outputs, groups, 16\\]"),
        ({"gate_up_proj_blocks": BLOCKS.to(torch.int32)}, "must be U8"),
        ({"gate_up_proj_scales": SCALES[:, :, :1].clone()}, "must be \\[4, 192, 2\\]"),
        ({"gate_up_proj_scales": SCALES[:2].clone()}, "must be \\[4, 192, 2\\]"),
        ({"gate_up_proj_scales": torch.full_like(SCALES, 255)}, "no number; download"),
        ({"router_blocks": BLOCKS}, "no GPT-OSS has"),
    ],
)
def test_damaged(changed: Tensors, message: str, tmp_path: Path) -> None:
    quantized, _ = build(tmp_path, **changed)
    with pytest.raises(ModelError, match=message):
        load(quantized)
