"""Packed linear layers equal plain ones and take their place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests import checkpoints
from torch import nn

from stemma.config.settings import ModelSettings
from stemma.model.cpu import weights
from stemma.model.cpu.weights import PackedLinear, can_pack, pack_linears
from stemma.model.loading import load_model

CPU = torch.device("cpu")
DTYPES = [torch.float32, *([torch.bfloat16] if can_pack(torch.bfloat16, CPU) else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 17), (2, 5), (0,)])
def test_equal_to_plain(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    plain = nn.Linear(96, 40, bias=bias, dtype=dtype)
    packed = PackedLinear(plain.weight, plain.bias)
    x = torch.randn(*shape, 96).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), plain(x), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(packed.weight, plain.weight)
    assert (packed.in_features, packed.out_features) == (96, 40)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.kept = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight


def test_tied_and_kept_layers_stay_plain() -> None:
    """Packing a tied head would double its memory."""
    model = Tied()
    shares: list[float] = []
    assert pack_linears(model, frozenset({model.kept}), shares.append) == 1
    assert isinstance(model.inner[0], PackedLinear)
    assert type(model.kept) is nn.Linear
    assert type(model.head) is nn.Linear
    assert shares == [0.0]
    assert sum(p.numel() for p in model.parameters()) == 10 * 16 + 16 * 16 + 16 + 16


def test_only_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """No packing for fp32 or CUDA, nor where the operators are missing or wrong."""
    assert not can_pack(torch.float32, CPU)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))

    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(weights, "_pack", missing)
    assert not can_pack(torch.bfloat16, CPU)
    monkeypatch.setattr(weights, "_pack", lambda weight: weight)
    monkeypatch.setattr(weights, "_packed_linear", lambda x, weight, bias: F.linear(x, weight, bias) + 1)
    assert not can_pack(torch.bfloat16, CPU)


def test_a_model_without_packing_still_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stemma.model.loading.can_pack", lambda dtype, device: False)
    path = checkpoints.build("qwen2", tmp_path)
    model = load_model(ModelSettings(path=path, device="cpu", dtype="bfloat16"))
    assert model.weight_bytes == sum(t.numel() * 2 for t in load_file(path / "model.safetensors").values())
