"""Tiny vision checkpoints, one of each family for all tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vision_checkpoints import make_vision_checkpoint


@pytest.fixture(scope="session")
def vision_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.fixture
def vision_path(family: str, vision_root: Path) -> Path:
    """The checkpoint of `family` in float32."""
    path = vision_root / family
    return path if path.exists() else make_vision_checkpoint(family, path)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    return lambda path: Path(shutil.copytree(path, tmp_path / "copy"))
