"""A tiny checkpoint, as the core's own tests have it."""

from __future__ import annotations

from tests.engine.conftest import checkpoint

__all__ = ["checkpoint"]
