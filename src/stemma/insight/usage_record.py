"""A row of the usage ledger before it is written, apart from the database: a server without a ledger never
imports SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stemma.types import Tier


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """One finished request."""

    request_id: str
    finished_at: float
    """Seconds since the epoch."""
    tenant: str
    model: str
    api: str
    """The plane: chat, completions, tgi and so on."""
    outcome: str
    """ok, aborted or error."""
    hit_tokens: Mapping[Tier, int] = field(default_factory=dict)
    miss_tokens: int = 0
    output_tokens: int = 0
