"""The Triton kernels compile for real chips, which needs none of them; and their shared memory fits.

In a process of its own: in this one Triton may be set to interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Of one block of threads, by compute capability."""


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
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability), shapes],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == number
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["num_tensor_core_products"] > 0, kernel


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90], ids=["ampere", "hopper"])
def test_what_a_fused_decoder_launches_compiles(capability: int) -> None:
    """Every launch of steps of 1 to 2,048 tokens: dense models, a mixture, latents; no sums in memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    script = Path(__file__).with_name("compile_fused.py")
    models = ("8B", "0.5B", "gemma", "mixture", "latent")
    done = subprocess.run(
        [sys.executable, str(script), str(capability), *models],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["model"] for kernel in kernels} == {*models}
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["spilled_bytes"] <= 16, kernel  # an address or two
