"""What the request models of all APIs have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class RequestModel(BaseModel):
    """Strict types (no ``"12"`` for 12), unknown fields ignored as OpenAI and vLLM do."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
