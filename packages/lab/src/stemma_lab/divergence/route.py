"""`/admin/divergences`: where the prompts of a window part from cached ones, and what that costs."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.api import EngineStats
from stemma.errors import InvalidRequest
from stemma.server.errors import json_response, openai_error
from stemma.server.openapi import parameter
from stemma.server.operator.context import OperatorContext, context_of
from stemma.server.routes import OPERATOR, Router

if TYPE_CHECKING:  # at a server's start nothing of the lab is imported
    from stemma_lab.divergence.report import Divergence, DivergenceReport
    from stemma_lab.divergence.whatif import CacheShape

router = Router(openai_error)
DEFAULT_WINDOW_S = 86400.0
_MAX_WINDOW_S = 366 * 86400.0


@router.get(
    "/admin/divergences",
    OPERATOR,
    openapi_extra=parameter("window_s", {"type": "number", "minimum": 1, "maximum": _MAX_WINDOW_S}),
)
async def divergences(request: Request) -> Response:
    """The costliest divergences of the last ``window_s`` seconds (a day), among the last 16384 requests."""
    given = request.query_params.get("window_s")
    window_s = DEFAULT_WINDOW_S if given is None else _seconds(given)
    return json_response(await divergences_as_json(context_of(request), window_s))


async def divergences_as_json(context: OperatorContext, window_s: float) -> dict[str, Any]:
    """Return the report; one at a time is made, in a thread of its own."""
    from stemma_lab.divergence.report import find_divergences

    stats = await context.engine.stats()
    async with context.reporting:
        snapshot = context.instruments.divergences.snapshot()
        since = time.monotonic() - window_s
        decode = _decode(context)
        report = await asyncio.to_thread(
            find_divergences, snapshot, decode, cache_shape(context, stats), since=since
        )
        return await asyncio.to_thread(_as_json, context, report, stats.prefill_s_per_token)


def cache_shape(context: OperatorContext, stats: EngineStats) -> CacheShape:
    """Return the cache that requests find: all tiers of known size together."""
    from stemma_lab.divergence.whatif import CacheShape

    cache = context.settings.engine.cache
    lower = [] if stats.transfer is None else list(stats.transfer.tiers.values())
    capacity = stats.num_blocks + sum(tier.capacity_blocks or 0 for tier in lower)
    return CacheShape(cache.block_size, capacity, cache.eviction)


def _decode(context: OperatorContext) -> Any:
    tokenizer = context.engine.tokenizer
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= _MAX_WINDOW_S:
        raise InvalidRequest("window_s: a number of seconds, at least 1", param="window_s")
    return seconds


def _as_json(context: OperatorContext, report: DivergenceReport, per_token_s: float | None) -> dict[str, Any]:
    from stemma_lab.divergence.report import sentence

    decode = _decode(context)

    def shown(one: Divergence) -> dict[str, Any]:
        saved = report.saved_tokens(one)
        example = one.example
        replayed = one.replayed
        return {
            "shape": one.shape,
            "first_token": one.first_token,
            "end_token": one.end_token,
            "num_requests": one.num_requests,
            "num_missed_tokens": one.num_missed_tokens,
            "share": round(one.num_missed_tokens / max(1, report.num_missed_tokens), 4),
            "saved_tokens": saved,
            "saved_s": None if saved is None or per_token_s is None else round(saved * per_token_s, 3),
            "replay": None
            if replayed is None
            else {
                "num_prompts": replayed.num_prompts,
                "num_changed": replayed.num_changed,
                "num_prompt_tokens": replayed.num_prompt_tokens,
                "num_cached_tokens": replayed.num_cached_tokens,
                "num_cached_tokens_moved": replayed.num_cached_tokens_moved,
            },
            "example": {
                "common": decode(example.before),
                "cached": decode([*example.before, *example.cached]) if example.cached else None,
                "yours": decode([*example.before, *example.yours[: len(example.cached) or None]]),
            },
            "advice": sentence(report, one, per_token_s),
        }

    return {
        "seconds": round(report.seconds, 3),
        "num_requests": report.num_requests,
        "num_prompt_tokens": report.num_prompt_tokens,
        "num_missed_tokens": report.num_missed_tokens,
        "missed_tokens_by_reason": report.missed_tokens_by_reason,
        "prefill_s_per_token": per_token_s,
        "divergences": [shown(one) for one in report.divergences],
    }
