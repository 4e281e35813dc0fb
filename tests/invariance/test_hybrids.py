"""Models with recurrent layers, bit for bit: logits in any schedule, answers from any tier, drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stemma.config.settings import ModelSettings
from stemma.model.loading import load_model
from stemma.native.library import load_kernels
from tests import hybrids
from tests.invariance.schedules import check_schedules
from tests.invariance.serving import check_family
from tests.native.isa import level_params

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

DTYPES = ("bfloat16", "float32")
ENGINES = ("qwen3_next", "granitemoehybrid", "lfm2", "mamba")
"""One of each kind of recurrence; the others run in `make test-all`."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


def checkpoint(family: str, root: Path) -> Path:
    path = root / family
    return path if path.exists() else hybrids.build(family, path)


def settings_of(path: Path, **fields: Any) -> ModelSettings:
    return ModelSettings(path=path, device="cpu", **fields)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", hybrids.FAMILIES)
def test_any_schedule(family: str, dtype: str, root: Path) -> None:
    settings = settings_of(checkpoint(family, root), dtype=dtype)
    check_schedules(load_model(settings), 1)


@pytest.mark.parametrize("family", ENGINES)
def test_any_way_of_serving(family: str, root: Path, tmp_path: Path) -> None:
    check_family(checkpoint(family, root), "float32", tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", hybrids.FAMILIES)
def test_any_way_of_serving_all(family: str, dtype: str, root: Path, tmp_path: Path) -> None:
    check_family(checkpoint(family, root), dtype, tmp_path, 8)


@pytest.mark.slow
@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("family", hybrids.FAMILIES)
def test_any_schedule_at_every_level(family: str, isa: str, root: Path) -> None:
    settings = settings_of(checkpoint(family, root), dtype="bfloat16", isa=isa)
    check_schedules(load_model(settings), 5)
