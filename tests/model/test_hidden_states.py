"""Embeddings of every family are made of the hidden states that transformers has behind the final norm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stemma import LLM
from stemma.model.load import loading
from stemma.native.library import load_kernels
from tests import checkpoints, hybrids
from tests.model.conftest import MODULES, NATIVE, TORCH

PROMPT = [3 + 7 * number % 500 for number in range(90)]
WAYS = (NATIVE, MODULES, TORCH) if load_kernels() is not None else (TORCH,)
SOME = ("qwen3", "gemma2", "deepseek-v3", "gpt-oss")
"""Families that run in all ways; the others in the one that they are served in."""
CASES = [
    *((family, way) for family in SOME for way in WAYS[1:]),
    *((family, WAYS[0]) for family in (*checkpoints.FAMILIES, *hybrids.FAMILIES)),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way"), CASES)
def test_embeddings(family: str, way: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / family
    if not path.exists():
        (checkpoints if family in checkpoints.FAMILIES else hybrids).build(family, path)
    if way != NATIVE:
        monkeypatch.setattr(loading, "fitting_layout", lambda _checkpoint: None)
    if way == TORCH:
        monkeypatch.setattr(loading, "load_kernels", lambda _isa: None)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        states = reference.base_model(torch.tensor([PROMPT])).last_hidden_state[0]
    wanted = {"last": states[-1].numpy(), "mean": states.mean(dim=0).numpy()}
    for pooling in ("last", "mean"):
        llm = LLM(path, dtype="float32", pooling=pooling, kv_cache_memory="16MB", max_batch_tokens=64)
        for _ in range(2):
            [found] = llm.embed([PROMPT], normalize=False)
            np.testing.assert_allclose(found.vector, wanted[pooling], rtol=2e-3, atol=2e-3)
        llm.close()
