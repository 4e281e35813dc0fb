"""`--log-requests`: one line for each request that ends. Never text."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stemma.server.door.caller import caller
from stemma.server.observe.logs import FIELDS

if TYPE_CHECKING:  # it brings torch, which a router does without
    from stemma.server.observe.watches import RequestRecord

logger = logging.getLogger("stemma.requests")
_SAFE = frozenset("-_.:/[]{}")


def log_request(record: RequestRecord) -> None:
    """Log one line of ``key=value`` pairs, as `request_line` gives it."""
    caller().is_logged = True
    _log(_pairs(record))


def log_refusal(route: str, status: int, reason: str, field: str, tenant: str) -> None:
    """Log one line for a request that was refused before the engine saw it."""
    pairs: list[tuple[str, object]] = [
        ("route", route),
        ("outcome", "refused"),
        ("status", status),
        ("reason", reason),
    ]
    pairs += [(name, _clean(value)) for name, value in (("field", field), ("tenant", tenant)) if value]
    pairs.append(("x_request_id", caller().x_request_id))
    _log(pairs)


def _log(pairs: list[tuple[str, object]]) -> None:
    logger.info(_line(pairs), extra={FIELDS: dict(pairs)})


def _line(pairs: list[tuple[str, object]]) -> str:
    return " ".join(f"{name}={value}" for name, value in pairs)


def request_line(record: RequestRecord) -> str:
    """Return the line. Names that clients choose are shown without blanks and control characters."""
    return _line(_pairs(record))


def _pairs(record: RequestRecord) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = [
        ("request", _clean(record.request_id)),
        ("api", record.api),
        ("outcome", record.outcome),
    ]
    if record.x_request_id:
        pairs.append(("x_request_id", record.x_request_id))
    if record.tenant:
        pairs.append(("tenant", _clean(record.tenant)))
    pairs.append(("prompt_tokens", record.num_prompt_tokens))
    cache = record.cache
    if cache is not None:
        pairs.append(("cached_tokens", cache.num_cached_tokens))
        pairs += [(f"from_{tier.value}", count) for tier, count in cache.cached_by_tier.items()]
        pairs.append(("miss", cache.miss_reason or "none"))
    pairs.append(("generated_tokens", record.num_generated_tokens))
    for name, seconds in (
        ("queue_ms", record.queue_s),
        ("load_ms", record.load_s or None),
        ("first_token_ms", record.first_token_s),
        ("total_ms", record.total_s),
    ):
        if seconds is not None:
            pairs.append((name, round(1000 * seconds, 1)))
    if record.finish_reason is not None:
        pairs.append(("finish", record.finish_reason.value))
    return pairs


def _clean(name: str) -> str:
    return "".join(char if char.isalnum() or char in _SAFE else "?" for char in name)
