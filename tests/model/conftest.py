from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stemma.config.settings import ModelSettings
from stemma.model.load import loading
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from tests import checkpoints

NATIVE, MODULES, TORCH = "native", "modules", "torch"
"""Ways to run a model: fused layers, transformers' modules with native attention, torch alone."""
PATHS = (NATIVE, MODULES, TORCH)

LoadFamily = Callable[..., tuple[Path, CausalLM]]


@pytest.fixture(scope="session")
def load_family(tmp_path_factory: pytest.TempPathFactory) -> LoadFamily:
    """Build and load a family once: `load_family(name, dtype, path, isa, quantize)` -> (directory, model)."""
    root = tmp_path_factory.mktemp("checkpoints")
    loaded: dict[tuple[str, ...], tuple[Path, CausalLM]] = {}

    def load(
        family: str, dtype: str = "float32", path: str = NATIVE, isa: str = "auto", quantize: str = "none"
    ) -> tuple[Path, CausalLM]:
        key = family, dtype, path, isa, quantize
        if key not in loaded:
            checkpoint = root / family
            if not checkpoint.exists():
                checkpoints.build(family, checkpoint)
            with pytest.MonkeyPatch.context() as patch:
                if path != NATIVE:
                    patch.setattr(loading, "fitting_layout", lambda _checkpoint: None)
                if path == TORCH:
                    patch.setattr(loading, "load_kernels", lambda isa: None)
                fields = {"dtype": dtype, "device": "cpu", "isa": isa, "quantize": quantize}
                settings = ModelSettings.model_validate({"path": checkpoint, **fields})
                model = load_model(settings)
            loaded[key] = checkpoint, model
        return loaded[key]

    return load
