"""`/admin/tree`: the prefix tree as numbers, for a picture of it and a list."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.core.tree_outline import MAX_NODES, TreeOutline
from stemma.server.errors import json_response, openai_error
from stemma.server.openapi import QueryNumber
from stemma.server.operator.context import OperatorContext, context_of
from stemma.server.routes import OPERATOR, Router

router = Router(openai_error)
_MAX_NODES = QueryNumber("max_nodes", 1, MAX_NODES, MAX_NODES)
_MAX_TEXTS = 2000
"""Nodes, nearest to the roots first, whose first words are shown."""


@router.get(
    "/admin/tree",
    OPERATOR,
    openapi_extra=_MAX_NODES.extra,
)
async def tree(request: Request) -> Response:
    """Nodes of the prefix tree, parents first, as parallel lists, what only lower tiers hold last; 10000."""
    context = context_of(request)
    outline = await context.engine.cache_control.outline(_MAX_NODES.of(request))
    return json_response(await asyncio.to_thread(_as_json, context, outline))


def _as_json(context: OperatorContext, outline: TreeOutline) -> dict[str, Any]:
    tokenizer = context.engine.tokenizer
    return {
        "num_nodes": outline.num_nodes,
        "block_size": outline.block_size,
        "namespaces": [
            {"owner": namespace.owner, "adapter": namespace.adapter, "has_salt": bool(namespace.salt)}
            for namespace in outline.namespaces
        ],
        "parent": outline.parents,
        "namespace": outline.roots,
        "start": outline.starts,
        "tokens": outline.num_tokens,
        "age_s": [None if age is None else round(age, 1) for age in outline.ages_s],
        "pinned": outline.pinned,
        "below": outline.below,
        "on_device": outline.on_device,
        "text": [
            tokenizer.decode(ids, skip_special_tokens=False) for ids in outline.first_tokens[:_MAX_TEXTS]
        ],
    }
