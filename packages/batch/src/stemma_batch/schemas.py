"""Bodies of ``/v1/batches``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from stemma.server.schemas.base import RequestModel

MAX_WINDOW_S = 7 * 24 * 3600
_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_Key = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]


class OutputExpiry(RequestModel):
    """How long the files of results are kept."""

    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(ge=3600, le=2_592_000)


class BatchRequest(RequestModel):
    """Body of ``POST /v1/batches``, with OpenAI's fields."""

    input_file_id: str = Field(max_length=64)
    endpoint: str = Field(max_length=64)
    completion_window: str = Field(default="24h", pattern=r"^[1-9][0-9]{0,3}[mhd]$")
    """A number and m, h or d; a week at most."""
    metadata: dict[_Key, _Value] | None = Field(default=None, max_length=16)
    output_expires_after: OutputExpiry | None = None

    @property
    def window_s(self) -> int:
        """Seconds of the window."""
        return int(self.completion_window[:-1]) * _UNITS[self.completion_window[-1]]
