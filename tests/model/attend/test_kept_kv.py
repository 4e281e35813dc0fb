"""What a model keeps, and where it can be kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stemma.errors import ConfigError
from stemma.memory.device.layout import StateLayout, StatePart, WindowGroup
from stemma.model.attend.kept_kv import KeptKV, KVShape, check_modules

CHUNKS = WindowGroup((0,), 128, 2, 16, is_chunked=True)
KEPT = KeptKV(KVShape(2, 2, 2, 16, windows=CHUNKS), "Llama4ForCausalLM", torch.bfloat16, "cpu", 1000)


def test_chunks_lie_in_pages_if_they_are_freed() -> None:
    assert KEPT.layout(16, frees_windows=True).windows == CHUNKS
    assert KEPT.layout(16).windows is None


def test_chunks_run_elsewhere_within_the_first_one_alone() -> None:
    elsewhere = replace(KEPT, device="cuda")
    with pytest.raises(ConfigError, match="a max_model_len of at most 128"):
        elsewhere.layout(16)
    assert replace(elsewhere, max_model_len=128).layout(16).windows is None


def test_modules_run_recurrent_layers_on_cpu_alone() -> None:
    """What else runs them is for the decoder to say: their states lie in blocks anywhere."""
    recurrent = replace(KEPT.shape, windows=None, state=StateLayout((StatePart(0, "recurrent", (2, 8, 8)),)))
    assert replace(KEPT, shape=recurrent, device="cuda").layout(16).blocks_per_state
    check_modules(recurrent, KEPT.architecture, "cpu")
    with pytest.raises(ConfigError, match=r"Llama4ForCausalLM has recurrent layers.*gpu_path fused"):
        check_modules(recurrent, KEPT.architecture, "cuda")
