"""Who a load tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, float], None]
"""Called with the name of the current stage and the share of it that is done, 0..1."""
