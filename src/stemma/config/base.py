"""What all settings have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _split_paths(given: Any) -> Any:
    return tuple(part for part in given.split(os.pathsep) if part) if isinstance(given, str) else given


PathList = Annotated[tuple[Path, ...], BeforeValidator(_split_paths)]
"""Paths; in a flag or a variable separated by colons."""


class SettingsModel(BaseModel):
    """Base of every component: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    flag_prefix: ClassVar[str] = ""
    """Prefix of these settings' names in flags and variables."""
