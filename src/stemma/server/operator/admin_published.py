"""The operator's plane of published prefixes: what all tenants share."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import InvalidRequest
from stemma.prefix.keys import Namespace
from stemma.server.door.published import Published
from stemma.server.errors import json_response, openai_error
from stemma.server.openapi import takes
from stemma.server.operator.context import context_of
from stemma.server.operator.prompts import PromptRequest, prewarm_prompt, prompt_tokens
from stemma.server.routes import OPERATOR, Router
from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import Name
from stemma.server.turn.body import read_object, validate
from stemma.server.turn.models import check_model

router = Router(openai_error, prefix="/admin/cache")


class PublishRequest(PromptRequest):
    """A prefix to publish."""

    name: Name = ""
    """For people."""


class UnpublishRequest(RequestModel):
    """A prefix to publish no longer."""

    publish_id: Name


@router.post("/publish", OPERATOR, openapi_extra=takes(PublishRequest))
async def publish(request: Request) -> Response:
    """Let all tenants share the whole blocks of a prompt, and compute them."""
    context, body = context_of(request), validate(PublishRequest, await read_object(request))
    if not context.settings.engine.cache.enable_prefix_cache:
        raise InvalidRequest("the prefix cache is off: there is nothing to share")
    adapter = check_model(context.engine, body.model)
    tokens = await prompt_tokens(context, body, is_open=True)
    made = await context.published.add(tokens, body.name, "" if adapter is None else adapter.key)
    answer = _as_json(made) | {"num_prompt_tokens": len(tokens), "is_kept": context.published.is_kept}
    namespace = Namespace(adapter=made.adapter, is_public=True)
    before = await prewarm_prompt(context, made.tokens, namespace, adapter)
    return json_response(answer | {"num_cached_tokens": before.num_cached_tokens})


@router.post("/unpublish", OPERATOR, openapi_extra=takes(UnpublishRequest))
async def unpublish(request: Request) -> Response:
    """Share a prefix no longer. Its blocks are found by nobody from then on, and evicted with time."""
    body = validate(UnpublishRequest, await read_object(request))
    return json_response(_as_json(await context_of(request).published.remove(body.publish_id)))


@router.get("/published", OPERATOR)
async def published(request: Request) -> Response:
    """All published prefixes, without their tokens."""
    known = context_of(request).published
    return json_response({"published": [_as_json(one) for one in known.prefixes], "is_kept": known.is_kept})


def _as_json(one: Published) -> dict[str, Any]:
    return {
        "publish_id": one.publish_id,
        "name": one.name,
        "adapter": one.adapter,
        "num_public_tokens": len(one.tokens),
        "created_at": round(one.created_at, 3),
    }
