"""Levels as test parameters: skipped by the name of the feature that a processor lacks."""

from __future__ import annotations

from typing import Any

import pytest

from stemma.native.building import find_compiler, prebuilt_levels
from stemma.native.levels import EMULATED, LEVELS, Level, architecture, missing_features


def level_params(*, emulated: bool = True) -> list[Any]:
    """Return a parameter for every level of this architecture, by name.

    With `emulated` also for AMX's code on emulated tiles.
    """
    levels = (*LEVELS, *([EMULATED] if emulated else []))
    return [_param(level) for level in levels if not level.features or level.architecture == architecture()]


def _param(level: Level) -> Any:
    missing = missing_features(level)
    reason = f"needs {', '.join(missing)}" if missing else "needs a C++ compiler"
    is_lacking = bool(missing) or (find_compiler() is None and level not in prebuilt_levels())
    return pytest.param(level.name, marks=pytest.mark.skipif(is_lacking, reason=reason))
