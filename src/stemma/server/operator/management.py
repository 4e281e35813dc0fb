"""Health, models, metrics, and a look into the cache."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from stemma.server.errors import json_response, openai_error
from stemma.server.observe.metric_aliases import render_aliases
from stemma.server.observe.tier_metrics import engine_as_json
from stemma.server.openapi import QueryNumber
from stemma.server.operator.context import OperatorContext, context_of
from stemma.server.operator.told import told_of
from stemma.server.routes import OPERATOR, PUBLIC, SUMS, TENANT, TEXT_TYPE, Router
from stemma.server.turn.models import check_model, served_names

open_router = Router(openai_error)
"""Needs no API key: load balancers ask it."""
router = Router(openai_error)
admin_router = Router(openai_error, prefix="/admin")
_MAX_TOKENS = QueryNumber("max_tokens", 1, 1000, 24)


@open_router.get("/health", PUBLIC)
async def health(request: Request) -> Response:
    """200 while requests are taken; 503 once the engine has failed, with the reason, or the server drains.

    Beside the status stands what routers go by (`told.py`).
    """
    context = context_of(request)
    if context.engine.failure is not None:
        return json_response({"status": "failed", "reason": context.engine.failure}, 503)
    if context.lifecycle.draining:
        return json_response({"status": "draining"}, 503)
    return json_response({"status": "ok", **told_of(context).as_json()})


def _model_cards(context: OperatorContext) -> list[dict[str, Any]]:
    """Return the model by each of its names, then its adapters, which name it as their parent (as vLLM)."""
    shared = {
        "object": "model",
        "created": context.lifecycle.started_at,
        "owned_by": "stemma",
        "max_model_len": context.engine.max_model_len,
        "input_modalities": ["text"] if context.engine.images is None else ["text", "image"],
    }
    served, *others = served_names(context.engine)
    return [
        {"id": served, **shared, "root": served, "parent": None},
        *({"id": other, **shared, "root": served, "parent": None} for other in others),
        *(
            {"id": named.name, **shared, "root": named.path.name, "parent": served}
            for named in context.engine.adapters.all()
        ),
    ]


@router.get("/v1/models", TENANT)
async def list_models(request: Request) -> Response:
    """The model that is served, and its adapters."""
    return json_response({"object": "list", "data": _model_cards(context_of(request))})


@router.get("/v1/models/{name:path}", TENANT)
async def get_model(request: Request) -> Response:
    """The served model or one of its adapters, or 404."""
    context, name = context_of(request), request.path_params["name"]
    check_model(context.engine, name)
    model, *named = _model_cards(context)
    return json_response(next((card for card in named if card["id"] == name), model))


@router.get("/metrics", SUMS, sends=(TEXT_TYPE,))
async def metrics(request: Request) -> Response:
    """Counters and histograms in Prometheus' text format."""
    context = context_of(request)
    stats = await context.engine.stats()
    text = context.instruments.metrics.render(stats, context.admission.states())
    for names in context.metric_aliases:
        text += render_aliases(names, context.instruments.metrics, stats, context.engine.model_name)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@admin_router.get("/stats", OPERATOR)
async def engine_stats(request: Request) -> Response:
    """The engine's counters and gauges as JSON."""
    return json_response(engine_as_json(await context_of(request).engine.stats()))


@admin_router.get(
    "/cache/tree",
    OPERATOR,
    sends=(TEXT_TYPE,),
    openapi_extra=_MAX_TOKENS.extra,
)
async def draw_tree(request: Request) -> Response:
    """The prefix index as an indented drawing; ``?max_tokens=24`` limits the text of each edge."""
    return PlainTextResponse(await context_of(request).engine.draw_tree(_MAX_TOKENS.of(request)))
