"""A small model and its server, and a browser, as the core's end-to-end tests have them."""

from __future__ import annotations

from tests.e2e.conftest import browser, page, served, shared_server, tiny_model

__all__ = ["browser", "page", "served", "shared_server", "tiny_model"]
