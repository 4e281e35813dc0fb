"""Levels as test parameters: those that the processor has."""

from __future__ import annotations

from typing import Any

import pytest

from stemma.native.building import find_compiler, prebuilt_levels
from stemma.native.levels import EMULATED, LEVELS, Level, missing_features


def level_params(*, emulated: bool = True) -> list[Any]:
    """Return a parameter for every level that the processor has, by name.

    With `emulated` also for AMX's code on emulated tiles. What the processor lacks of the others is said by
    test_library.py alone, not by thousands of skipped tests.
    """
    levels = (*LEVELS, *([EMULATED] if emulated else []))
    return [_param(level) for level in levels if not missing_features(level)]


def _param(level: Level) -> Any:
    is_lacking = find_compiler() is None and level not in prebuilt_levels()
    return pytest.param(level.name, marks=pytest.mark.skipif(is_lacking, reason="needs a C++ compiler"))
