"""A small model and its server, as the core's end-to-end tests have them."""

from __future__ import annotations

from tests.e2e.conftest import served, shared_server, tiny_model

__all__ = ["served", "shared_server", "tiny_model"]
