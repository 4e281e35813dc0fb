"""Checkpoints of msModelSlim are read by the formulas of its documentation, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import quantized_files as files
from tests.model.formats.twins import NONE, PER_TOKEN, STATIC, check, check_logits, read
from tests.quantized_files import Quantize, Tensors, Twin

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError, UnsupportedModel
from stemma.model.files.fingerprint import model_fingerprint
from stemma.model.load.loading import load_model
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight


def modelslim(kind: str) -> Quantize:
    """A weight as msModelSlim stores it in a format; numbers by the formulas of its documentation."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if kind == "W4A8_DYNAMIC":
            codes, scales, _, numbers = files.round_to(weight, 4, 32, zero=False)
            signed = (codes - 8).to(torch.int8)
            packed = (signed[0::2] & 15) | (signed[1::2] << 4)
            first = torch.rand(weight.shape[0], 1) + 0.5
            tensors = {
                "weight": packed,
                "weight_scale": first,
                "weight_offset": torch.zeros_like(first),
                "weight_scale_second": scales / first,
                "weight_offset_second": torch.zeros_like(scales),
                "scale_bias": torch.zeros_like(first),
            }
            return tensors, numbers
        codes, scales, numbers = files.int8_rows(weight)
        tensors = {"weight": codes}
        if kind not in ("W8A8", "W8A8S"):
            offset = torch.zeros_like(scales)
            if kind == "W8A16":
                offset += 3
                numbers = (codes - offset) * scales
            tensors |= {"weight_scale": scales, "weight_offset": offset}
        if kind in ("W8A8", "W8A8S", "W8A8_MIX"):
            deq_scale = (scales * 0.05).flatten()
            tensors |= {
                "input_scale": torch.tensor([0.05]),
                "input_offset": torch.tensor([-7.0]),
                "deq_scale": deq_scale,
                "quant_bias": (7 * codes.int().sum(1)).int(),
            }
            if kind == "W8A8S":  # as for float16 models
                tensors["deq_scale"] = deq_scale.view(torch.int32).to(torch.int64)
        return tensors, numbers

    return quantize


def described(twin: Twin, kind: str, file: str) -> Twin:
    names = load_file(twin.quantized / file)
    description = {name: kind if "_proj." in name else "FLOAT" for name in names} | {"model_quant_type": kind}
    (twin.quantized / "quant_model_description.json").write_text(json.dumps(description))
    return twin


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("W8A8", STATIC),
        ("W8A8S", STATIC),
        ("W8A16", NONE),
        ("W8A8_DYNAMIC", PER_TOKEN),
        ("W8A8_MIX", PER_TOKEN),
        ("W4A8_DYNAMIC", PER_TOKEN),
    ],
)
def test_modelslim(kind: str, scheme: ActivationScheme, tmp_path: Path) -> None:
    file = f"quant_model_weight_{kind.lower()}.safetensors"
    twin = described(files.rewrite(tmp_path, modelslim(kind), {}, file=file), kind, file)
    check(twin, scheme)
    if scheme is NONE:
        check_logits(twin)
    if scheme is STATIC:
        weight = read(twin.quantized)["model.layers.1.self_attn.o_proj.weight"]
        assert isinstance(weight, QuantizedWeight)
        assert weight.activation_scale == pytest.approx(0.05)
        assert weight.activation_zero_point == -7


def test_modelslim_bias_comes_out_of_quant_bias(tmp_path: Path) -> None:
    """Qwen2 has biases; the file may hold them inside quant_bias alone."""
    file = "quant_model_weight_w8a8.safetensors"
    twin = described(files.rewrite(tmp_path, modelslim("W8A8"), {}, family="qwen2", file=file), "W8A8", file)
    name = "model.layers.0.self_attn.q_proj"

    def move(weights: Tensors) -> None:
        weights[f"{name}.quant_bias"] += (
            (weights[f"{name}.bias"] / weights[f"{name}.deq_scale"]).round().int()
        )
        del weights[f"{name}.bias"]

    files.edit(twin.quantized, move, file)
    bias = read(twin.quantized)[f"{name}.bias"]
    assert isinstance(bias, torch.Tensor)
    torch.testing.assert_close(bias, twin.numbers()[f"{name}.bias"], atol=1e-2, rtol=0)


def test_modelslim_norms_of_outlier_suppression(tmp_path: Path) -> None:
    file = "quant_model_weight_w8a8.safetensors"
    twin = described(files.rewrite(tmp_path, modelslim("W8A8"), {}, file=file), "W8A8", file)
    norm = "model.layers.0.input_layernorm"

    def smooth(weights: Tensors) -> None:
        weights[f"{norm}.module.weight"] = weights[f"{norm}.weight"] * 2
        weights[f"{norm}.module.bias"] = torch.zeros(64)

    files.edit(twin.quantized, smooth, file)
    found = read(twin.quantized)[f"{norm}.weight"]
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, twin.numbers()[f"{norm}.weight"] * 2)
    files.edit(twin.quantized, lambda weights: weights[f"{norm}.module.bias"].fill_(1.0), file)
    with pytest.raises(UnsupportedModel, match="bias from outlier suppression"):
        read(twin.quantized)


def test_the_description_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    file = "quant_model_weight_w8a8_mix.safetensors"
    twin = described(files.rewrite(tmp_path, modelslim("W8A8_MIX"), {}, file=file), "W8A8_MIX", file)
    before = model_fingerprint(twin.quantized)
    described(twin, "W8A8", file)
    assert model_fingerprint(twin.quantized) != before


def test_codes_that_nothing_describes_are_refused(tmp_path: Path) -> None:
    """They would be taken for plain numbers."""
    file = "quant_model_weight_w8a8.safetensors"
    twin = described(files.rewrite(tmp_path, modelslim("W8A8"), {}, file=file), "W8A8", file)
    (twin.quantized / "quant_model_description.json").write_text("{}")
    with pytest.raises(ModelError, match="is I8, but nothing says how it is quantized"):
        read(twin.quantized)


def test_modelslim_that_isnt_read_is_refused_by_name(tmp_path: Path) -> None:
    file = "quant_model_weight_w8a8.safetensors"
    twin = described(files.rewrite(tmp_path, modelslim("W8A8"), {}, file=file), "W8A8", file)
    described(twin, "W4A4_DYNAMIC", file)
    with pytest.raises(UnsupportedModel, match=r"W4A4_DYNAMIC, which isn't read\. Read are FLOAT"):
        load_model(ModelSettings(path=twin.quantized, device="cpu"))
    described(twin, "W8A8", file)
    (twin.quantized / "quant_model_description_w8a8.json").write_text("{}")
    with pytest.raises(ModelError, match="several descriptions"):
        load_model(ModelSettings(path=twin.quantized, device="cpu"))
    (twin.quantized / "quant_model_description_w8a8.json").unlink()
    part = twin.quantized / "part0-of-4"
    part.mkdir()
    (part / "quant_model_description_w8a8sc.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="W8A8SC"):
        load_model(ModelSettings(path=twin.quantized, device="cpu"))
