"""Quantized files keep the promise: what was cached, chunked or batched can't be seen in any logit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from stemma.config.settings import ModelSettings
from stemma.model.load.loading import load_model
from stemma.native.library import load_kernels
from tests import gguf_files
from tests import quantized_files as files
from tests.invariance.schedules import check_schedules
from tests.model.formats.compressed import INT8_INPUTS, STATIC_INPUTS, W4, W8, compressed

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

NUM_EXAMPLES = 3


def mixed(name: str) -> Kind:
    """As llama.cpp's Q4_K_M: values and projections down have more bits than what stands beside them."""
    return Kind.Q6_K if "v_proj" in name or "down_proj" in name else Kind.Q4_K


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_gguf(kind: Kind, tmp_path: Path) -> None:
    path = gguf_files.build("llama", tmp_path, kind).path
    check_schedules(load_model(ModelSettings(path=path, dtype="bfloat16", device="cpu")), NUM_EXAMPLES)


def test_gguf_whose_layers_mix_types(tmp_path: Path) -> None:
    path = gguf_files.build(
        "qwen3", tmp_path, mixed, hidden_size=256, intermediate_size=256, head_dim=64
    ).path
    check_schedules(load_model(ModelSettings(path=path, dtype="bfloat16", device="cpu")), NUM_EXAMPLES)


@pytest.mark.parametrize(
    ("weights", "inputs", "kind"),
    [(W8, STATIC_INPUTS | {"symmetric": False}, "int-quantized"), (W4, INT8_INPUTS, "pack-quantized")],
    ids=["static", "per-token"],
)
def test_inputs_in_int8(weights: dict[str, Any], inputs: dict[str, Any], kind: str, tmp_path: Path) -> None:
    quantize, config = compressed(weights, inputs, kind)
    path = files.rewrite(tmp_path, quantize, config).quantized
    check_schedules(load_model(ModelSettings(path=path, dtype="bfloat16", device="cpu")), NUM_EXAMPLES)
