"""A model with `--quantize` computes what transformers computes with the same codes, dequantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import gguf_files
from tests.checkpoints import build
from tests.model.conftest import MODULES, NATIVE, LoadFamily
from tests.model.paging import PagedSequences
from tests.native.isa import level_params
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError
from stemma.model.load.loading import load_model
from stemma.model.weights.rounding import RoundToNearest, fitting_group, quantize
from stemma.native.library import load_kernels

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

PROMPTS = [[(97 * number + 31 * position) % 500 for position in range(4)] for number in range(16)]
"""Many short ones: where float32 rounds an input to another code, no token after it is as expected."""
ROUTED = ("kv_b_proj.weight", "mlp.gate.weight")
"""Weights that are never rounded."""


class QuantizedInputs(TorchFunctionMode):
    """Rounds the inputs of products as int8 per token and group, but for some weights."""

    def __init__(self, plain: set[int], group_size: int) -> None:
        super().__init__()
        self._plain, self._group_size = plain, group_size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[1].data_ptr() not in self._plain:
            size = fitting_group(args[0].shape[-1], self._group_size)
            assert size is not None
            grouped = args[0].reshape(*args[0].shape[:-1], -1, size)
            scale = grouped.abs().amax(-1, keepdim=True) / 127
            args = (((grouped / scale).nan_to_num().round() * scale).view(args[0].shape), *args[1:])
        return func(*args, **(kwargs or {}))


def expected_logits(path: Path, bits: int, group_size: int) -> torch.Tensor:
    """Logits [prompts, T, vocab] of transformers with rounded weights and inputs."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    plain: set[int] = set()
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if name.endswith(ROUTED) or (name.endswith("embed_tokens.weight") and not tied):
            plain.add(parameter.data_ptr())
        elif parameter.dim() >= 2:
            is_head = parameter is model.get_output_embeddings().weight
            how = RoundToNearest(8 if is_head else bits, group_size)
            for matrix in parameter.data.view(-1, *parameter.shape[-2:]):
                rounded = quantize(matrix, how)
                if rounded is None:  # no group divides its inputs
                    plain.add(parameter.data_ptr())
                else:
                    matrix.copy_(rounded.dequantize(torch.float32))
    with torch.inference_mode(), QuantizedInputs(plain, group_size):
        logits: torch.Tensor = model(torch.tensor(PROMPTS), use_cache=False).logits
    return logits


def served_logits(model: Any) -> torch.Tensor:
    run = PagedSequences(model, PROMPTS)
    run.step([(number, 1 + number % 3) for number in range(len(PROMPTS))])
    run.finish(chunk=1)
    return torch.stack(run.logits)


def check(served: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but where a rounding error of float32 moved an input to the next code."""
    errors = (served - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (errors < 1e-5).float().mean() > 0.7
    assert errors.max() < 0.05


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", [NATIVE, MODULES])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3-moe", "deepseek-v3", "gemma2"])
def test_equal_to_transformers_with_the_same_codes(
    family: str, quantize: str, how: str, load_family: LoadFamily
) -> None:
    path, model = load_family(family, "float32", how, quantize=quantize)
    bits, group_size = (8, 128) if quantize == "int8" else (4, 32)
    check(served_logits(model), expected_logits(path, bits, group_size))


@pytest.mark.parametrize("isa", level_params())
def test_every_level(isa: str, load_family: LoadFamily) -> None:
    path, model = load_family("llama", "float32", isa=isa, quantize="int4")
    check(served_logits(model), expected_logits(path, 4, 32))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_tied_head_is_rounded_once_and_gives_the_embeddings(family: str, tmp_path: Path) -> None:
    path = build(family, tmp_path / "tied", tie_word_embeddings=True)
    settings = ModelSettings(
        path=path, dtype="float32", device="cpu", quantize="int4", quantize_group_size=64
    )
    check(served_logits(load_model(settings)), expected_logits(path, 4, 64))


def test_rounding_takes_fewer_bytes_and_changes_the_fingerprint(load_family: LoadFamily) -> None:
    """KV of rounded weights is never served to plain ones, nor between two roundings."""
    path, plain = load_family("llama", "bfloat16")
    models = [plain, *(load_family("llama", "bfloat16", quantize=q)[1] for q in ("int8", "int4"))]
    models.append(
        load_model(
            ModelSettings(path=path, dtype="bfloat16", device="cpu", quantize="int4", quantize_group_size=64)
        )
    )
    assert len({model.fingerprint for model in models}) == len(models)
    int8, int4 = models[1].weight_bytes, models[2].weight_bytes
    assert int4 < int8 < plain.weight_bytes


@pytest.mark.parametrize("kind", [gguf_files.Kind.Q8_0, gguf_files.Kind.Q4_0, gguf_files.Kind.Q4_1])
def test_inputs_of_quantized_weights_are_rounded_alone(kind: gguf_files.Kind, tmp_path: Path) -> None:
    file = gguf_files.build("llama", tmp_path, kind)
    settings = ModelSettings(path=file.path, dtype="float32", device="cpu")
    plain, rounded = load_model(settings), load_model(settings.model_copy(update={"quantize": "inputs"}))
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode(), QuantizedInputs(set(), 32):
        check(served_logits(rounded), model(torch.tensor(PROMPTS), use_cache=False).logits)
    assert plain.fingerprint != rounded.fingerprint
    assert plain.weight_bytes == rounded.weight_bytes


def test_there_are_no_inputs_to_round_beside_plain_weights(tmp_path: Path) -> None:
    path = build("llama", tmp_path)
    with pytest.raises(ConfigError, match="this checkpoint's weights are plain"):
        load_model(ModelSettings(path=path, device="cpu", quantize="inputs"))


def test_without_kernels_rounding_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEMMA_NATIVE", "0")
    path = build("llama", tmp_path)
    with pytest.raises(ConfigError, match="needs the CPU kernels"):
        load_model(ModelSettings(path=path, device="cpu", quantize="int8"))
