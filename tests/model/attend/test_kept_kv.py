"""What a model keeps, and where it can be kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stemma.errors import ConfigError
from stemma.memory.device.layout import WindowGroup
from stemma.model.attend.kept_kv import KeptKV, KVShape

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
