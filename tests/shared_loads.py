"""Engines of equal settings of the model share its load, which takes most of the start of a small one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import pytest
import torch

from stemma.config.settings import ModelSettings
from stemma.engine import build as engine_build
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM


@contextmanager
def shared_loads() -> Iterator[None]:
    """Let engines that are built in here take a model that an engine before them loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_build, "load_model", _load_once)
        yield


def _load_once(
    settings: ModelSettings, _progress: object = None, *, predicts: bool, group: object, plan: object
) -> CausalLM:
    assert settings.num_threads is not None
    assert group is None, "each rank has its own share"
    model = _loaded(settings.model_copy(update={"num_threads": 1}), predicts)
    torch.set_num_threads(settings.num_threads)
    return model


@lru_cache(maxsize=2)
def _loaded(settings: ModelSettings, predicts: bool) -> CausalLM:
    return load_model(settings, predicts=predicts)
