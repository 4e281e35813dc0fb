"""What a server of Stemma's tells routers with each check (`/health`): its load, and what it serves.

Anybody may read it, so that what names the model, its template and its adapters are digests. Other servers
tell nothing of it.
"""

from __future__ import annotations

from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

_DAY_S = 86_400.0
MOST_TOLD_BYTES = 64 * 1024
MAX_ADAPTERS = 1024


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class ToldLoad(_Told):
    """How busy a server is, and how fast."""

    seats: int = Field(ge=1, le=1_000_000)
    """Answers that it computes at once."""
    running: int = Field(default=0, ge=0, le=10_000_000)
    waiting: int = Field(default=0, ge=0, le=10_000_000)
    """Requests in its queue."""
    kv_in_use: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of its KV blocks that running requests hold."""
    seat_s: float | None = Field(default=None, gt=0.0, le=_DAY_S)
    """How long an answer has its seat, prompt included: the mean of the latest."""
    answer_tokens: float | None = Field(default=None, ge=0.0, le=1e7)
    """Tokens of an answer: the mean of the latest."""
    prefill_s_per_token: float | None = Field(default=None, gt=0.0, le=60.0)
    row_s: float | None = Field(default=None, gt=0.0, le=60.0)
    """Seconds that one more answer adds to each decode step."""


class ToldModel(_Told):
    """What a server serves; servers behind one router should tell the same."""

    block_size: int = Field(ge=1, le=65_536)
    """Tokens of a block."""
    model: str = Field(max_length=64)
    """Digest of the weights: checkpoint, revision, quantization."""
    kv: str = Field(max_length=64)
    """Digest of dtype, layout and numeric path of its KV."""
    template: str = Field(default="", max_length=64)
    """Digest of the chat template."""
    adapters: tuple[tuple[int, int], ...] = Field(default=(), max_length=MAX_ADAPTERS)
    """Of each adapter: its `adapter_root`, and the root of its blocks."""


class Told(_Told):
    """All that a server tells."""

    decode_s_per_token: float | None = Field(default=None, gt=0.0, le=60.0)
    """How slow an answer may be that isn't stuck: mean and four deviations of the gap between tokens."""
    load: ToldLoad | None = None
    serves: ToldModel | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `/health`."""
        return self.model_dump(mode="json", exclude_none=True)


NOTHING = Told()


def adapter_root(name: str | None) -> int:
    """Return how routers name what is before a prompt's first block: 0, or a hash of the adapter's name."""
    return 0 if not name else xxhash.xxh3_64_intdigest(name.encode())


def read_told(content: bytes) -> Told:
    """Return what the body of a server's `/health` tells; nothing if that can't be read."""
    if len(content) > MOST_TOLD_BYTES:
        return NOTHING
    try:
        return Told.model_validate_json(content)
    except ValidationError:
        return NOTHING
