"""``POST /rerank`` as Jina and vLLM have it, and vLLM's ``/score``: how well documents answer a query.

Every pair is a request of its own. Instruction and query come first in each, so the prefix cache gives them
to all documents but the first.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.scoring import pairs_of, scoring_of
from stemma.server.answers.usage import UsageMeter
from stemma.server.apis.embeddings import vector_of
from stemma.server.errors import json_response, openai_error
from stemma.server.openapi import takes
from stemma.server.routes import TENANT, Router
from stemma.server.schemas.pooling import Document, RerankRequest, ScoreRequest
from stemma.server.turn.body import read_object, validate
from stemma.server.turn.context import ApiContext, context_of
from stemma.server.turn.models import answered_by, check_model
from stemma.server.turn.pooling import pooling_asked, read_pairs
from stemma.server.turn.run import new_request_id

router = Router(openai_error)
_KEPT_NUMBER_BYTES = 4


@router.post("/rerank", TENANT, openapi_extra=takes(RerankRequest))
@router.post("/v1/rerank", TENANT, openapi_extra=takes(RerankRequest))
@router.post("/v2/rerank", TENANT, openapi_extra=takes(RerankRequest))
async def rerank(request: Request) -> Response:
    """Return the documents' scores, the best first."""
    context = context_of(request)
    body = validate(RerankRequest, await read_object(request))
    texts = [one.text if isinstance(one, Document) else one for one in body.documents]
    pairs = [(body.query, text) for text in texts]
    head, scores, usage = await _scored(context, request, body, pairs, "rerank", "documents")
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))
    results = [
        {
            "index": index,
            **({} if body.return_documents is False else {"document": {"text": texts[index]}}),
            "relevance_score": scores[index],
        }
        for index in order[: body.top_n or len(order)]
    ]
    return json_response({**head, "results": results, "usage": usage})


@router.post("/score", TENANT, openapi_extra=takes(ScoreRequest))
@router.post("/v1/score", TENANT, openapi_extra=takes(ScoreRequest))
async def score(request: Request) -> Response:
    """Return the score of each pair, in their order."""
    context = context_of(request)
    body = validate(ScoreRequest, await read_object(request))
    pairs = pairs_of(body.text_1, body.text_2)
    head, scores, usage = await _scored(context, request, body, pairs, "score", "text_2")
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
    head |= {"object": "list", "created": int(time.time())}
    return json_response({**head, "data": data, "usage": usage})


async def _scored(
    context: ApiContext,
    request: Request,
    body: RerankRequest | ScoreRequest,
    pairs: list[tuple[str, str]],
    api: str,
    param: str,
) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Return the head of the answer, the score of each pair, and the usage of all."""
    adapter = check_model(context.engine, body.model)
    names = context.settings.engine.model.rerank_tokens
    scoring = scoring_of(context.engine.abilities, context.engine.tokenizer, names)
    context.runner.expect(len(pairs))
    read = await read_pairs(
        context.intake, scoring, pairs, body.instruction, param=param, salt=body.cache_salt or ""
    )
    request_id = new_request_id(api)
    num_kept = context.engine.abilities.hidden_size if scoring.pooling.needs_hidden else 0
    asked = pooling_asked(
        request_id, read.prompts, scoring.pooling, body, adapter, _KEPT_NUMBER_BYTES * num_kept
    )
    turns = [context.turns.build(request, api, one) for one in asked]
    results = await context.runner.run_to_end(request, turns)
    vectors = [vector_of(result) for result in results]
    scores = [scoring.score([vectors[number] for number in numbers]) for numbers in read.numbers]
    head = {"id": request_id, "model": answered_by(context.engine, adapter)}
    return head, scores, UsageMeter.of(results).usage()
