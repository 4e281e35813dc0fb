"""`--log-requests`: one line for each request that ends. Never text."""

from __future__ import annotations

import logging

from stemma.server.door.caller import caller
from stemma.server.observe.watches import RequestRecord

logger = logging.getLogger("stemma.requests")
_SAFE = frozenset("-_.:/[]{}")


def show_log(name: str) -> None:
    """Write what is logged under `name` at level INFO to standard error, unless a handler is set up."""
    log = logging.getLogger(name)
    log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)


def log_request(record: RequestRecord) -> None:
    """Log one line of ``key=value`` pairs, as `request_line` gives it."""
    caller().is_logged = True
    logger.info(request_line(record))


def log_refusal(route: str, status: int, reason: str, field: str, tenant: str) -> None:
    """Log one line for a request that was refused before the engine saw it."""
    pairs = [("route", route), ("outcome", "refused"), ("status", status), ("reason", reason)]
    pairs += [(name, _clean(value)) for name, value in (("field", field), ("tenant", tenant)) if value]
    pairs.append(("x_request_id", caller().x_request_id))
    logger.info(" ".join(f"{name}={value}" for name, value in pairs))


def request_line(record: RequestRecord) -> str:
    """Return the line. Names that clients choose are shown without blanks and control characters."""
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
            pairs.append((name, f"{1000 * seconds:.1f}"))
    if record.finish_reason is not None:
        pairs.append(("finish", record.finish_reason.value))
    return " ".join(f"{name}={value}" for name, value in pairs)


def _clean(name: str) -> str:
    return "".join(char if char.isalnum() or char in _SAFE else "?" for char in name)
