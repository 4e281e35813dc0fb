"""Base of the request models of all APIs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class RequestModel(BaseModel):
    """Strict types (no ``"12"`` for 12), unknown fields ignored as OpenAI and vLLM do, and logged once."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that would change the answer and aren't implemented, with the values that change nothing."""
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {}
    """Fields that hold an object with such tables of its own."""
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change the answer: ignored without a word."""
    hints: ClassVar[frozenset[str]] = frozenset()
    """Wishes about style or effort that this server doesn't act on and that can't make an answer wrong:
    accepted, and counted where they are given (`ignored_hints.py`)."""

    @classmethod
    @cache
    def known_names(cls) -> frozenset[str]:
        """Return the names of all fields that aren't news to us."""
        fields = (field.alias or name for name, field in cls.model_fields.items())
        return frozenset(fields) | frozenset(cls.refused) | cls.harmless | cls.hints
