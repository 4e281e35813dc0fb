"""Quantized checkpoints are read as their libraries read them, and refused by name where they aren't."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

from stemma import guests
from stemma.config.settings import ModelSettings
from stemma.errors import ModelError, UnsupportedModel
from stemma.model.formats import compressed_tensors
from stemma.model.formats.checkpoint import CheckpointTensors
from stemma.model.formats.reading import find_format, read_quantized
from stemma.model.formats.summary import FormatCounts
from stemma.model.load.loading import load_model
from stemma.model.weights.quantized import ActivationScheme, QuantizedWeight
from stemma.model.weights.stored import StoredWeights
from tests import quantized_files as files
from tests.model.formats.compressed import INT8_INPUTS, STATIC_INPUTS, W4, W8, compressed
from tests.model.formats.twins import NONE, PER_TOKEN, STATIC, check, check_logits, read
from tests.quantized_files import Twin


@pytest.mark.one_in(3)
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
    quantize, config = compressed(W8, None, "int-quantized")
    twin = files.rewrite(tmp_path, quantize, config)
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


def test_a_format_of_a_package_that_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "entry_points", lambda **_: [])
    quantize, config = compressed(W8, None, "int-quantized")
    twin = files.rewrite(tmp_path, quantize, config)
    (twin.quantized / "quant_model_description.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"msModelSlim.*pip install \./packages/mindie"):
        load_model(ModelSettings(path=twin.quantized, device="cpu"))


def test_a_package_reads_a_format_by_its_quant_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = EntryPoints([EntryPoint("w8", f"{__name__}:read_w8", "stemma.formats")])
    monkeypatch.setattr(guests, "entry_points", points.select)
    quantize, config = compressed(W8, None, "int-quantized")
    twin = files.rewrite(tmp_path, quantize, config)
    assert find_format(twin.quantized, {"quant_method": "w9"}) is None
    quantization = config["quantization_config"] | {"quant_method": "w8"}
    assert find_format(twin.quantized, quantization) == "w8"
    weights, _ = read_quantized(twin.quantized, "w8", quantization, None, torch.float32)
    assert weights.keys() == twin.numbers().keys()


def read_w8(
    tensors: CheckpointTensors, quantization: dict[str, Any], dtype: torch.dtype
) -> tuple[StoredWeights, FormatCounts]:
    return compressed_tensors.read_weights(
        tensors, quantization | {"quant_method": "compressed-tensors"}, dtype
    )
