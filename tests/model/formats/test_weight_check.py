"""A weight that is NaN or infinite is refused, and the error names the file that holds it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError
from stemma.model.files.gguf_header import read_header
from stemma.model.load import loading
from stemma.model.load.loading import load_model
from tests import checkpoints, gguf_files, quantized_files

NAN = float("nan")
ONE, OTHER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ADVICE = "download or convert"


def refusal(path: Path, **settings: str) -> str:
    with pytest.raises(ModelError) as refused:
        load_model(ModelSettings.model_validate({"path": path, "device": "cpu", **settings}))
    return str(refused.value)


def spoil(path: Path, name: str, value: float = NAN) -> None:
    """Set the last number of a tensor, and move this tensor alone into the second of two files."""
    weights = load_file(path / "model.safetensors")
    weights[name].view(-1)[-1] = value
    (path / "model.safetensors").unlink()
    weight_map = {stored: OTHER if stored == name else ONE for stored in weights}
    for file in (ONE, OTHER):
        held = {stored: tensor for stored, tensor in weights.items() if weight_map[stored] == file}
        save_file(held, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_one_file_of_several(family: str, value: float, tmp_path: Path) -> None:
    """Llama's weights are read by us, Gemma's by transformers."""
    path = checkpoints.build(family, tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    spoil(path, name, value)
    message = refusal(path)
    assert f"weight {name} has 1 values that are NaN or infinite" in message
    assert f"{path / OTHER}, {ADVICE}" in message
    assert ONE not in message


def test_a_weight_that_has_another_name_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers joins the experts of a layer."""
    monkeypatch.setattr(loading, "fitting_layout", lambda _checkpoint: None)
    path = checkpoints.build("qwen3-moe", tmp_path)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    spoil(path, name)
    message = refusal(path)
    assert "weight model.layers.1.mlp.experts.down_proj has 1 values" in message
    assert f"{path / OTHER} (there {name}), {ADVICE}" in message


def test_the_layer_for_multi_token_prediction(tmp_path: Path) -> None:
    path = checkpoints.build_mtp(tmp_path)
    name = f"model.layers.{checkpoints.MTP_LAYER}.hnorm.weight"
    spoil(path, name)
    with pytest.raises(ModelError) as refused:
        load_model(ModelSettings(path=path, device="cpu"), predicts=True)
    assert f"{path / OTHER} (there {name}), {ADVICE}" in str(refused.value)


def test_scales_of_gptq(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    quantize = quantized_files.gptq(4, 32, zero=True)
    path = quantized_files.rewrite(tmp_path, quantize, {"quantization_config": config}).quantized
    name = "model.layers.0.mlp.up_proj.scales"
    spoil(path, name)
    assert refusal(path).startswith(f"{path / OTHER}: {name} has values that are NaN or infinite; {ADVICE}")


def test_scales_of_fp8(tmp_path: Path) -> None:
    def quantize(weight: torch.Tensor) -> tuple[quantized_files.Tensors, torch.Tensor]:
        return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1)}, weight

    config = {"quantization_config": {"quant_method": "fp8"}}
    path = quantized_files.rewrite(tmp_path, quantize, config).quantized
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    spoil(path, name)
    message = refusal(path)
    assert "weight model.layers.1.mlp.up_proj.weight has" in message
    assert f"{path / OTHER} (there {name}), {ADVICE}" in message


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_gguf(kind: Kind, tmp_path: Path) -> None:
    path = gguf_files.build("llama", tmp_path, kind).path
    tensor = read_header(path).tensors["blk.1.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.start)
        file.write(b"\xff\xff\xff\xff")  # a number of float32, or a block's scale in float16: NaN
    message = refusal(path)
    assert str(path) in message
    assert "NaN or infinite" in message
    assert "blk.1.ffn_up.weight" in message or "model.layers.1.mlp.up_proj.weight" in message


def test_a_number_that_only_the_dtype_makes_infinite(tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path)
    spoil(path, "model.norm.weight", 3.4e38)
    message = refusal(path, dtype="bfloat16")
    assert "weight model.norm.weight has 1 values that are NaN or infinite" in message
    assert "too large for bfloat16; set another dtype" in message
    assert ADVICE not in message


@pytest.mark.parametrize(
    ("family", "tensor", "weight"),
    [
        ("llama", "blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
        ("gemma2", "output_norm.weight", "model.norm.weight"),
        ("qwen3-moe", "blk.1.ffn_down_exps.weight", "model.layers.1.mlp.experts.0.down_proj.weight"),
    ],
)
def test_a_number_of_gguf_that_only_the_dtype_makes_infinite(
    family: str, tensor: str, weight: str, tmp_path: Path
) -> None:
    path = gguf_files.build(family, tmp_path).path
    start = read_header(path).tensors[tensor].start

    def write(value: float) -> str:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(struct.pack("<f", value))
        return refusal(path, dtype="bfloat16")

    message = write(3.4e38)
    assert f"weight {weight} has 1 values that are NaN or infinite" in message
    assert "too large for bfloat16; set another dtype" in message
    assert ADVICE not in message
    message = write(NAN)
    assert f"they come from {path} (there {tensor}), {ADVICE}" in message
    assert "too large" not in message
