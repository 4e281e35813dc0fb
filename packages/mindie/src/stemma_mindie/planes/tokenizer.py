"""MindIE's ``/v1/tokenizer``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.server.apis.tokenize import encoded, token_texts
from stemma.server.errors import json_response, tgi_error
from stemma.server.openapi import takes
from stemma.server.routes import TENANT, Router
from stemma.server.turn.body import read_object, validate
from stemma_mindie.planes.schemas import TokenizerRequest

router = Router(tgi_error)


@router.post("/v1/tokenizer", TENANT, openapi_extra=takes(TokenizerRequest))
async def tokenize(request: Request) -> Response:
    """Count the tokens of ``inputs`` and, with ``do_decode``, show them as text."""
    body = validate(TokenizerRequest, await read_object(request))
    ids = await encoded(request, body.inputs, "inputs", add_special_tokens=True)
    tokens: list[Any] = await token_texts(request, ids, "inputs") if body.do_decode else ids
    return json_response({"token_number": len(ids), "tokens": tokens})
