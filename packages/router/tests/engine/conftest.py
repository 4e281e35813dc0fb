"""A small engine, as the engine's own tests have it."""

from __future__ import annotations

from tests.engine.conftest import checkpoint, harness, model, tokenizer

__all__ = ["checkpoint", "harness", "model", "tokenizer"]
