"""A scripted engine, with and without a socket, as the server's own tests have it."""

from __future__ import annotations

from tests.server.conftest import engine, live_url, settings, tokenizer, tokenizer_path

__all__ = ["engine", "live_url", "settings", "tokenizer", "tokenizer_path"]
