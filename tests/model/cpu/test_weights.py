"""Packed linear layers equal plain ones and take their place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import checkpoints
from torch import nn

from stemma.config.settings import ModelSettings
from stemma.model.cpu.packing import Packing
from stemma.model.cpu.weights import PackedProduct, can_pack
from stemma.model.foreign.linears import PackedLinear, pack_linears
from stemma.model.foreign.weights import ModuleWeights
from stemma.model.load.loading import load_model
from stemma.native.library import Kernels, load_kernels

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def kernels() -> Kernels:
    loaded = load_kernels()
    if loaded is None:
        pytest.skip("needs native kernels")
    return loaded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 17), (2, 5), (0,)])
def test_equal_to_plain(kernels: Kernels, shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    plain = nn.Linear(96, 40, bias=bias, dtype=dtype)
    packed = PackedLinear(PackedProduct(kernels, [plain.weight], plain.bias))
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


def test_tied_and_kept_layers_stay_plain(kernels: Kernels) -> None:
    """Packing a tied head would double its memory."""
    model = Tied()
    shares: list[float] = []
    assert (
        pack_linears(
            model,
            ModuleWeights(model, {}),
            Packing(kernels, torch.float32),
            frozenset({model.kept}),
            shares.append,
        )
        == 1
    )
    assert isinstance(model.inner[0], PackedLinear)
    assert type(model.kept) is nn.Linear
    assert type(model.head) is nn.Linear
    assert shares == [0.0]
    assert sum(p.numel() for p in model.parameters()) == 10 * 16 + 16 * 16 + 16


def test_what_cant_be_packed_stays_plain(kernels: Kernels) -> None:
    """Pairs of bfloat16 need an even width; other types are torch's."""
    assert can_pack(torch.zeros(3, 5))
    assert not can_pack(torch.zeros(3, 5, dtype=torch.bfloat16))
    assert not can_pack(torch.zeros(3, 4, dtype=torch.float16))
    assert not can_pack(torch.zeros(0, 4))
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 5)).bfloat16()
    assert (
        pack_linears(
            model, ModuleWeights(model, {}), Packing(kernels, torch.bfloat16), frozenset(), lambda share: None
        )
        == 1
    )
    assert type(model[0]) is nn.Linear


def test_a_model_without_kernels_still_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEMMA_NATIVE", "0")
    path = checkpoints.build("qwen2", tmp_path)
    model = load_model(ModelSettings(path=path, device="cpu", dtype="bfloat16"))
    assert model.weight_bytes == sum(t.numel() * 2 for t in load_file(path / "model.safetensors").values())
