"""The Triton kernels compile for real chips, which needs none of them; and their shared memory fits.

In a process of its own: in this one Triton may be set to interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Of one block of threads, by compute capability."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "shapes", "number"),
    [
        pytest.param(90, "few", 5, id="hopper-few"),
        pytest.param(80, "all", 13, id="ampere", marks=pytest.mark.slow),
        pytest.param(90, "all", 13, id="hopper", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile(capability: int, shapes: str, number: int) -> None:
    """Shapes of 0.5B and 8B models, Gemma 2 (window, soft cap, head dim 256) and DeepSeek-V3's latent;
    and the passes over a shared prefix and behind it."""
    kernels = compiled(capability, shapes)
    assert len(kernels) == number
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["num_tensor_core_products"] > 0, kernel


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_listed_attention_compiles(capability: int) -> None:
    """No spill in its loop over keys. On sm_90 the small and the large tile of a layer are made of the same
    products, each warp with all keys of the tile: sums have one order in both. On sm_80 there is one tile.
    """
    kernels = compiled(capability, "listed")
    layouts: dict[str, dict[str, Any]] = {}
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["num_tensor_core_products"] > 0, kernel
        assert kernel["spills_in_loop"] == 0, kernel
        other = layouts.setdefault(kernel["name"], kernel)
        assert kernel["products"] == other["products"]
        if other["tile"] != kernel["tile"]:
            assert (other["layouts"], kernel["layouts"]) == (["4, 1"], ["8, 1"])
    assert sum(kernel["tile"][0] == 128 for kernel in kernels) == (5 if capability == 90 else 0)


def compiled(capability: int, *shapes: str, script: str = "compile_kernels.py") -> list[dict[str, Any]]:
    """Compile in another process; what is said of each kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), str(capability), *shapes],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90], ids=["ampere", "hopper"])
def test_what_a_fused_decoder_launches_compiles(capability: int) -> None:
    """Every launch of steps of 1 to 2,048 tokens: dense models, mixtures, latents; no sums in memory."""
    models: tuple[str, ...] = ("sampler", "8B", "0.5B", "axes", "gemma", "mixture", "latent")
    models += ("delta rule", "mamba 2")
    models += tuple(f"{name} in {kind}" for name in ("8B", "mixture") for kind in ("4 bits", "fp8"))
    kernels = compiled(capability, *models, script="compile_fused.py")
    assert {kernel["model"] for kernel in kernels} == {*models}
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["spilled_bytes"] <= 16, kernel  # an address or two
