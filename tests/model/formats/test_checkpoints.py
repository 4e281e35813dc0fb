"""Quantized checkpoints are read as their libraries read them, and refused by name where they aren't."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError, UnsupportedModel
from stemma.model.files.fingerprint import model_fingerprint
from stemma.model.formats.reading import find_format, read_quantized
from stemma.model.load.loading import load_model
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from tests import quantized_files as files
from tests.model.formats.compressed import INT8_INPUTS, STATIC_INPUTS, W4, W8, compressed
from tests.model.paging import PagedSequences, plain_logits
from tests.quantized_files import Quantize, Tensors, Twin

NONE, PER_TOKEN, STATIC = (
    ActivationScheme.NONE,
    ActivationScheme.DYNAMIC_TOKEN,
    ActivationScheme.STATIC_TENSOR,
)


def read(path: Path) -> Mapping[str, torch.Tensor | QuantizedWeight]:
    quantization = json.loads((path / "config.json").read_text()).get("quantization_config") or {}
    name = find_format(path, quantization)
    assert name is not None
    return read_quantized(path, name, quantization, None, torch.float32)[0]


def check(twin: Twin, scheme: ActivationScheme, *, quantized: bool = True) -> None:
    """Every weight is there, with the numbers of the plain checkpoint."""
    numbers, weights = twin.numbers(), read(twin.quantized)
    assert weights.keys() == numbers.keys()
    for name, weight in weights.items():
        if isinstance(weight, QuantizedWeight):
            assert weight.activations is scheme
            weight = weight.dequantize(torch.float32)
        else:
            assert not (quantized and name.endswith("_proj.weight")), name
        torch.testing.assert_close(weight, numbers[name], rtol=1e-5, atol=1e-6, msg=name)


def check_logits(twin: Twin, tolerance: float = 1e-3) -> None:
    model = load_model(ModelSettings(path=twin.quantized, dtype="float32", device="cpu"))
    prompt = list(range(20, 60))
    run = PagedSequences(model, [prompt])
    run.finish(chunk=16)
    torch.testing.assert_close(run.logits[0], plain_logits(twin.plain, prompt), atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
@pytest.mark.parametrize(
    ("bits", "zero", "added"), [(4, True, 1), (4, False, 0), (8, True, 1), (2, False, 1), (3, True, 1)]
)
def test_gptq(bits: int, zero: bool, added: int, family: str, tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False}
    if added == 0:
        config["checkpoint_format"] = "gptq_v2"
    quantize = files.gptq(bits, 32, zero=zero, added=added)
    twin = files.rewrite(tmp_path, quantize, {"quantization_config": config}, family=family)
    check(twin, NONE)
    if bits == 4:
        check_logits(twin)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_zero_points_of_0_borrow_from_their_neighbours(bits: int, tmp_path: Path) -> None:
    """Groups without negative weights have a zero point of 0."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False}
    quantize = files.gptq(bits, 32, zero=True)

    def with_zeros(weight: torch.Tensor) -> tuple[files.Tensors, torch.Tensor]:
        rows = torch.arange(weight.shape[0])[:, None]
        return quantize(torch.where(rows % 3 == 1, weight.abs(), weight))

    check(files.rewrite(tmp_path, with_zeros, {"quantization_config": config}, family="llama"), NONE)


def test_gptq_with_permuted_groups_is_dequantized(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    quantize = files.gptq(4, 32, zero=True, order=torch.ones(1))
    twin = files.rewrite(tmp_path, quantize, {"quantization_config": config})
    check(twin, NONE, quantized=False)
    model = load_model(ModelSettings(path=twin.quantized, device="cpu"))
    assert "14 GPTQ 4 bits with permuted groups as float32" in model.info.formats
    name = "model.layers.0.mlp.up_proj.g_idx"
    files.edit(twin.quantized, lambda weights: weights[name].fill_(7))
    with pytest.raises(ModelError, match=r"g_idx names groups outside 0\.\.1"):
        read(twin.quantized)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_awq(family: str, tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    twin = files.rewrite(tmp_path, files.awq(32), {"quantization_config": config}, family=family)
    check(twin, NONE)
    check_logits(twin)


FP8 = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("weights", "inputs", "kind", "scheme"),
    [
        (W8, INT8_INPUTS, "int-quantized", PER_TOKEN),
        (W8, STATIC_INPUTS, "int-quantized", STATIC),
        (W8, STATIC_INPUTS | {"symmetric": False}, "int-quantized", STATIC),
        (W8, INT8_INPUTS | {"symmetric": False}, "int-quantized", NONE),
        (W8 | {"strategy": "tensor"}, None, "naive-quantized", NONE),
        (W8, None, "pack-quantized", NONE),
        (W8 | {"symmetric": False}, None, "pack-quantized", NONE),
        (W4, None, "pack-quantized", NONE),
        (W4 | {"symmetric": False}, None, "pack-quantized", NONE),
        (W4, INT8_INPUTS, "pack-quantized", PER_TOKEN),
        (W4 | {"num_bits": 3}, None, "pack-quantized", NONE),
    ],
    ids=str,
)
def test_compressed_tensors(
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
    kind: str,
    scheme: ActivationScheme,
    tmp_path: Path,
) -> None:
    quantize, config = compressed(weights, inputs, kind)
    twin = files.rewrite(tmp_path, quantize, config)
    check(twin, scheme)
    if scheme is STATIC:
        weight = read(twin.quantized)["model.layers.0.mlp.up_proj.weight"]
        assert isinstance(weight, QuantizedWeight)
        assert weight.activation_scale == pytest.approx(0.05)
        assert weight.activation_zero_point == (-3 if inputs and not inputs.get("symmetric", True) else 0)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_compressed_tensors_in_fp8(strategy: str, tmp_path: Path) -> None:
    args = FP8 | {"strategy": strategy} | ({"block_structure": [16, 32]} if strategy == "block" else {})
    quantize, config = compressed(args, None, "float-quantized")
    twin = files.rewrite(tmp_path, quantize, config)
    check(twin, NONE, quantized=False)
    check_logits(twin)


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


def refuse(twin: Twin, change: Callable[[dict[str, Any]], object], message: str) -> None:
    """What `change` makes of quantization_config is refused with the message; the file is restored."""
    config = twin.quantized / "config.json"
    content = config.read_text()
    written = json.loads(content)
    change(written["quantization_config"])
    config.write_text(json.dumps(written))
    with pytest.raises(ModelError, match=message):
        load_model(ModelSettings(path=twin.quantized, device="cpu"))
    config.write_text(content)


def test_codes_without_scales_are_refused(tmp_path: Path) -> None:
    """They would be taken for plain numbers."""
    file = "quant_model_weight_w8a8.safetensors"
    twin = described(files.rewrite(tmp_path / "a", modelslim("W8A8"), {}, file=file), "W8A8", file)
    (twin.quantized / "quant_model_description.json").write_text("{}")
    with pytest.raises(ModelError, match="is I8, but nothing says how it is quantized"):
        read(twin.quantized)
    quantize, config = compressed(W8, None, "int-quantized")
    twin = files.rewrite(tmp_path / "b", quantize, config)
    files.edit(twin.quantized, lambda weights: weights.__delitem__("model.layers.0.mlp.up_proj.weight_scale"))
    with pytest.raises(ModelError, match=r"up_proj\.weight is I8"):
        load_model(ModelSettings(path=twin.quantized, device="cpu"))


def test_gptq_that_isnt_read_is_refused_by_name(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    twin = files.rewrite(tmp_path, files.gptq(4, 32, zero=True), {"quantization_config": config})
    refuse(twin, lambda q: q.update(checkpoint_format="marlin"), "'marlin'; read are gptq and gptq_v2")
    refuse(twin, lambda q: q.update(bits=5), "bits 5; read are 2, 3, 4 and 8")
    refuse(twin, lambda q: q.update(bits=8), "correct bits in config.json")
    refuse(twin, lambda q: q.update(dynamic={"-:lm_head": {}}), "dynamic")
    refuse(twin, lambda q: q.update(quant_method="awq", version="gemm"), "doesn't fit scales")
    refuse(twin, lambda q: q.update(quant_method="awq", version="gemv"), "'gemv'.*read is gemm")
    name = "model.layers.0.mlp.up_proj.scales"
    files.edit(twin.quantized, lambda weights: weights[name].fill_(float("inf")))
    with pytest.raises(ModelError, match=r"model\.safetensors: .*up_proj\.scales has values that are NaN"):
        read(twin.quantized)
    files.edit(twin.quantized, lambda weights: weights.__delitem__(name))
    with pytest.raises(ModelError, match=r"has no .*up_proj\.scales"):
        read(twin.quantized)


def test_compressed_tensors_that_arent_read_are_refused_by_name(tmp_path: Path) -> None:
    quantize, config = compressed(W4, None, "pack-quantized")
    twin = files.rewrite(tmp_path, quantize, config)
    refuse(twin, lambda q: q.update(format="marlin-24"), "format marlin-24")
    refuse(twin, lambda q: q.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask")
    refuse(twin, lambda q: q.update(transform_config={"config_groups": {"a": {}}}), "rotates activations")
    refuse(twin, lambda q: q.update(config_groups={"a": {"targets": 3}}), "compressed-tensors doesn't read")
    refuse(twin, lambda q: q["config_groups"]["group_0"].update(targets=["re:nothing"]), "no group .* is for")
    refuse(twin, lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=8), "isn't a weight")
    refuse(twin, lambda q: q["config_groups"]["group_0"].update(weights=None), "leaves .* as it is")
    name = "model.layers.0.mlp.up_proj.weight_shape"
    files.edit(twin.quantized, lambda weights: weights[name].fill_(2**40))
    with pytest.raises(ModelError, match="isn't a weight"):
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


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_loading_holds_neither_all_codes_nor_all_plain_weights(family: str, tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    quantize = files.gptq(4, 32, zero=True, added=1)
    twin = files.rewrite(tmp_path, quantize, {"quantization_config": config}, family=family)
    plain: dict[str, int] = {}
    codes: list[int] = []

    def look(stage: str, _share: float) -> None:
        alive = [one for one in gc.get_objects() if type(one) is QuantizedWeight]
        codes.append(sum(one.codes.nbytes for one in alive))
        if stage not in plain:
            plain[stage] = plain_bytes() - before

    def plain_bytes() -> int:
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        return sum(one.nbytes for one in tensors if one.dim() > 1 and one.is_floating_point())

    before = plain_bytes()
    model = load_model(ModelSettings(path=twin.quantized, dtype="bfloat16", device="cpu"), look)
    numbers = twin.numbers()
    products = sum(value.numel() for name, value in numbers.items() if name.endswith("_proj.weight"))
    others = sum(value.numel() for name, value in numbers.items() if value.dim() > 1) - products
    assert model.info.formats.endswith("kept quantized")
    assert plain["packing weights"] <= 4 * others + 1024  # those that the file holds plain, as it does
    assert max(codes) < products / 2
