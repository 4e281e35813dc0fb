"""Figures of this moment, for `stemma top` and the dashboard: counters, tiers, tenants, requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.api import CacheReport
from stemma.errors import Overloaded
from stemma.server.errors import json_response, openai_error
from stemma.server.observe.tier_metrics import engine_as_json
from stemma.server.observe.watches import RequestRecord, RequestWatch
from stemma.server.openapi import QueryNumber
from stemma.server.operator.context import OperatorContext, context_of
from stemma.server.routes import EVENTS_TYPE, OPERATOR, Router
from stemma.server.transport.sse import EventStream, event

router = Router(openai_error)
MAX_STREAMS = 16
MAX_UNDER_WAY, MAX_ENDED = 100, 500
"""Requests in one snapshot."""
EVERY_S = 1.0
_SINCE = QueryNumber("since", 0, 2**53, 0)


@router.get("/admin/live/now", OPERATOR, openapi_extra=_SINCE.extra)
async def now(request: Request) -> Response:
    """One snapshot; of requests that ended, those whose number is above ``since``."""
    return json_response(await snapshot(context_of(request), _SINCE.of(request)))


@router.get("/admin/live", OPERATOR, sends=(EVENTS_TYPE,), openapi_extra=_SINCE.extra)
async def live(request: Request) -> Response:
    """A snapshot each second as server-sent events, until the client leaves or the server stops."""
    context = context_of(request)
    if context.instruments.watches.num_pages >= MAX_STREAMS:
        raise Overloaded(f"{MAX_STREAMS} pages watch this server already; close one")
    return EventStream(_snapshots(context, _SINCE.of(request)))


async def _snapshots(context: OperatorContext, since: int) -> AsyncGenerator[bytes, None]:
    context.instruments.watches.num_pages += 1
    try:
        while not context.lifecycle.draining:
            shown = await snapshot(context, since)
            since = shown["last_number"]
            yield event(shown)
            await asyncio.sleep(EVERY_S)
    finally:
        context.instruments.watches.num_pages -= 1


async def snapshot(context: OperatorContext, since: int) -> dict[str, Any]:
    """Return counters and gauges, the requests under way, and those that ended after number `since`."""
    stats = await context.engine.stats()
    watches = context.instruments.watches
    newest = watches.records[-1].number if watches.records else 0
    # A page that watched the server before a restart asks for numbers that don't exist yet.
    since = since if since <= newest else 0
    ended = [record for record in watches.records if record.number > since][-MAX_ENDED:]
    under_way = sorted(watches.running.values(), key=lambda watch: watch.arrived_at)[:MAX_UNDER_WAY]
    return {
        "time": time.time(),
        "model": context.engine.model_name,
        "started_at": context.lifecycle.started_at,
        "failure": context.engine.failure,
        "engine": engine_as_json(stats),
        "load": asdict(context.engine.load),
        "block_size": context.engine.key_space.block_size,
        "lately": watches.lately.told(),
        "budgets": [asdict(state) for state in context.admission.states()],
        "tenants": [{"name": name, **asdict(sums)} for name, sums in sorted(watches.tenants.items()) if name],
        "under_way": [_watch_as_json(watch) for watch in under_way],
        "ended": [_record_as_json(record) for record in ended],
        "last_number": newest,
    }


def _watch_as_json(watch: RequestWatch) -> dict[str, Any]:
    last = watch.so_far
    return {
        "request": watch.request.request_id,
        "api": watch.api,
        "tenant": watch.request.namespace.owner,
        "age_s": round(watch.age_s, 3),
        "prompt_tokens": len(watch.request.prompt_token_ids),
        "generated_tokens": 0 if last is None else last.num_generated_tokens,
        **_cached(None if last is None else last.cache),
    }


_SHOWN = ("number", "api", "tenant", "outcome", "arrived_at", "queue_s", "first_token_s", "total_s")


def _record_as_json(record: RequestRecord) -> dict[str, Any]:
    return {
        **{name: getattr(record, name) for name in _SHOWN},
        "request": record.request_id,
        "prompt_tokens": record.num_prompt_tokens,
        "generated_tokens": record.num_generated_tokens,
        **_cached(record.cache),
    }


def _cached(cache: CacheReport | None) -> dict[str, Any]:
    if cache is None:
        return {"cached_tokens": None, "by_tier": {}, "miss": None}
    by_tier = {tier.value: count for tier, count in cache.cached_by_tier.items()}
    return {"cached_tokens": cache.num_cached_tokens, "by_tier": by_tier, "miss": cache.miss_reason}
