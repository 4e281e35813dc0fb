"""`/admin/explain`: what one of the last requests got from the cache; `/admin/refusals`: who got nothing."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import NotFound
from stemma.server.errors import json_response, openai_error
from stemma.server.openapi import parameter
from stemma.server.operator.context import context_of
from stemma.server.routes import OPERATOR, Router

router = Router(openai_error)


@router.get("/admin/refusals", OPERATOR)
async def refusals(request: Request) -> Response:
    """The last requests that were refused, the newest first: which field, why, who asked."""
    return json_response({"refusals": request.app.state.refusals.last()})


@router.get("/admin/explain", OPERATOR, openapi_extra=parameter("request", {"type": "string"}))
async def explain(request: Request) -> Response:
    """Explain the request with the id ``request``, or the last one; the last 1024 are known."""
    context = context_of(request)
    wanted = request.query_params.get("request")
    note = (
        context.instruments.explanations.last()
        if wanted is None
        else context.instruments.explanations.find(wanted)
    )
    if note is None:
        which = "no request yet" if wanted is None else "no such request among the last ones"
        raise NotFound(f"{which}: give the id of an answer, or none for the last request", param="request")
    return json_response(await context.instruments.explainer.for_operator(note))
