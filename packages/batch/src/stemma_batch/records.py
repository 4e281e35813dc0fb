"""Files and batches as they are stored, and as OpenAI's API shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import orjson

BATCH_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"


class BatchStatus(StrEnum):
    """Where a batch is in its life, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset((BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED))
_TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file's facts; its bytes lie beside the database."""

    file_id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    """Seconds since 1970, as all times here."""
    expires_at: int

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """What a client asks for with a batch."""

    endpoint: str
    input_file_id: str
    completion_window: str
    """As the client wrote it, e.g. ``24h``."""
    window_s: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """Tokens of all answers so far."""

    num_input: int = 0
    num_cached: int = 0
    num_output: int = 0

    def plus(self, other: BatchUsage) -> BatchUsage:
        """Return the sum."""
        return BatchUsage(
            self.num_input + other.num_input,
            self.num_cached + other.num_cached,
            self.num_output + other.num_output,
        )

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "input_tokens": self.num_input,
            "input_tokens_details": {"cached_tokens": self.num_cached},
            "output_tokens": self.num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.num_input + self.num_output,
        }


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it is stored: its file, its state, its counts, its times."""

    batch_id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    metadata: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[Mapping[str, Any], ...] = ()
    """Why it failed: code, message, line, param."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: Mapping[str, int] = field(default_factory=dict)
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    usage: BatchUsage = BatchUsage()

    def at(self, status: BatchStatus, now: float, **changes: Any) -> Batch:
        """Return the batch once it has reached `status`."""
        times = {**self.times, f"{status}_at": int(now)}
        return replace(self, status=status, times=times, **changes)

    def packed(self) -> bytes:
        """Return bytes for `unpacked`."""
        return orjson.dumps(self)

    @classmethod
    def unpacked(cls, data: bytes) -> Batch:
        """Return the batch that `packed` wrote.

        Raises ValueError, TypeError, KeyError or AttributeError for other bytes.
        """
        fields = orjson.loads(data)
        fields["status"] = BatchStatus(fields["status"])
        fields["errors"] = tuple(fields["errors"])
        fields["usage"] = BatchUsage(**fields["usage"])
        return cls(**fields)

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        errors = {"object": "list", "data": list(self.errors)} if self.errors else None
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": str(self.status),
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.times.get(name) for name in _TIMES},
            "request_counts": {
                "total": self.num_total,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "usage": self.usage.shown(),
            "metadata": dict(self.metadata),
        }
