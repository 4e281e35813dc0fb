from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stemma.config.settings import ModelSettings
from stemma.model.causal_lm import CausalLM
from stemma.model.loading import load_model
from tests import checkpoints

LoadFamily = Callable[..., tuple[Path, CausalLM]]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def load_family(tmp_path_factory: pytest.TempPathFactory) -> LoadFamily:
    """Build and load a family once a session: `load_family(name, dtype)` -> (directory, model)."""
    root = tmp_path_factory.mktemp("checkpoints")
    loaded: dict[tuple[str, str], tuple[Path, CausalLM]] = {}

    def load(family: str, dtype: str = "float32") -> tuple[Path, CausalLM]:
        if (family, dtype) not in loaded:
            path = root / family
            if not path.exists():
                checkpoints.build(family, path)
            model = load_model(ModelSettings(path=path, dtype=dtype, device="cpu"))
            loaded[family, dtype] = path, model
        return loaded[family, dtype]

    return load
