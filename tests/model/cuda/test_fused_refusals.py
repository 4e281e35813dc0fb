"""`gpu_path` fused says what it doesn't compute, before a weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the optional extra `cuda` is not installed")

from tests import checkpoints, hybrids
from tests.vision_checkpoints import make_vision_checkpoint

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, UnsupportedModel
from stemma.model.load import device_loading
from stemma.model.load.device_loading import load_on_device
from stemma.model.load.job import LoadJob
from stemma.model.opened.checkpoint import open_checkpoint
from stemma.model.opened.checkpoint_config import describe_checkpoint


def job(path: Path, **fields: Any) -> LoadJob:
    settings = ModelSettings.model_validate({"path": path, "gpu_path": "fused", **fields})
    described = describe_checkpoint(settings)
    checkpoint = open_checkpoint(settings, described.config, described.vision)
    device = torch.device("cpu")
    return LoadJob(
        *(settings, checkpoint, device, 64, None, False, None, None), report=lambda _stage, _share: None
    )


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda path: hybrids.build("lfm2", path), "lfm2 models with these tensors in float32"),
        (lambda path: checkpoints.build("gemma2", path), "gemma2 models with these tensors in float32"),
    ],
    ids=["recurrent by modules", "no layout"],
)
def test_what_isnt_computed_is_named(
    build: Callable[[Path], Path], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_loading, "named_weights", lambda _checkpoint: pytest.fail("weights are read"))
    with pytest.raises(UnsupportedModel, match=f"gpu_path is fused, which doesn't compute {reason}.*modules"):
        load_on_device(job(build(tmp_path)), None)


def test_images_whose_tokens_see_each_other_are_named(tmp_path: Path) -> None:
    path = make_vision_checkpoint("gemma3", tmp_path)
    vision = describe_checkpoint(ModelSettings(path=path)).vision
    with pytest.raises(UnsupportedModel, match="compute images whose tokens see each other both ways"):
        load_on_device(job(path), vision)


def test_without_triton_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_loading, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="needs Triton"):
        load_on_device(job(checkpoints.build("llama", tmp_path)), None)
