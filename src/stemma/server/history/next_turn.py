"""What the turn after an answer would be: known to the APIs, wanted by idle time."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context
from typing import Protocol

from stemma.model.vision.prompt import PromptImages
from stemma.types import TokenArray


class RenderedTurn(Protocol):
    """A prompt of the turn that may come."""

    @property
    def token_ids(self) -> TokenArray:
        """int32."""

    @property
    def images(self) -> PromptImages | None:
        """Those of the conversation so far."""


class NextTurn(Protocol):
    """Knows how the turn after an answer would be rendered."""

    @property
    def context(self) -> Context:
        """The variables of the request, such as its caller."""

    async def prompts(self, text: str, token_ids: Sequence[int]) -> tuple[RenderedTurn, RenderedTurn]:
        """Return the prompts of two turns that differ in their new text alone. Raises StemmaError.

        `text`, `token_ids`: of the answer before it.
        """
