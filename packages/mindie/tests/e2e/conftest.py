"""A small model and its server, as the core's clients have them."""

from __future__ import annotations

from tests.conformance.conftest import url

__all__ = ["url"]
