"""What the entry point ``stemma.apis`` names: a server's advice on itself, for the operator's page."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.server.errors import json_response, openai_error
from stemma.server.guest_apis import GuestApi
from stemma.server.observe.tier_metrics import engine_as_json
from stemma.server.operator.context import context_of
from stemma.server.routes import OPERATOR, Router
from stemma_lab.divergence import route as divergences

router = Router(openai_error)


@router.get("/admin/advice", OPERATOR)
async def advice(request: Request) -> Response:
    """What to change for this server's traffic, as `stemma advise URL` says it."""
    context = context_of(request)
    stats = engine_as_json(await context.engine.stats())
    report = await divergences.divergences_as_json(context, divergences.DEFAULT_WINDOW_S)
    return json_response({"advice": await asyncio.to_thread(_advice, stats, report)})


def _advice(stats: dict[str, Any], report: dict[str, Any]) -> list[dict[str, Any]]:
    from stemma_lab.served_advice import from_server  # imports the lab: not at a server's start

    return [asdict(one) for one in from_server(stats, report)]


API = GuestApi((router, divergences.router))
