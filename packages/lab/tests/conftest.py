"""A scripted engine behind a real socket, and a tiny checkpoint, as the core's own tests have them."""

from __future__ import annotations

from tests.engine.conftest import checkpoint
from tests.server.conftest import engine, live_url, settings, tokenizer, tokenizer_path

__all__ = ["checkpoint", "engine", "live_url", "settings", "tokenizer", "tokenizer_path"]
