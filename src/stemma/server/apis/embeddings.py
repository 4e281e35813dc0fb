"""``POST /v1/embeddings``: OpenAI's, with vLLM's fields and the prompts of sentence-transformers."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.pooling import Pooling, Vector
from stemma.errors import GenerationFailed
from stemma.server.answers.usage import UsageMeter
from stemma.server.door.answer_memory import NUMBER_BYTES
from stemma.server.errors import json_response, openai_error
from stemma.server.observe.collected import Collected
from stemma.server.openapi import takes
from stemma.server.routes import TENANT, Router
from stemma.server.schemas.pooling import EmbeddingRequest
from stemma.server.turn.body import read_object, validate
from stemma.server.turn.context import context_of
from stemma.server.turn.intake import Intake
from stemma.server.turn.models import answered_by, check_model
from stemma.server.turn.pooling import pooling_asked
from stemma.server.turn.prompts import PromptCut, completion_prompts, num_prompts
from stemma.server.turn.run import new_request_id

router = Router(openai_error)


@router.post("/v1/embeddings", TENANT, openapi_extra=takes(EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """Return the embedding of each input, in their order."""
    context = context_of(request)
    body = validate(EmbeddingRequest, await read_object(request))
    adapter = check_model(context.engine, body.model)
    embedding = context.engine.abilities.embedding_format()
    embedding.check_dimensions(body.dimensions)
    context.runner.expect(num_prompts(body.input))
    prompts = await completion_prompts(
        context.intake,
        _prompted(body.input, embedding.prompt(body.prompt_name)),
        add_special_tokens=body.add_special_tokens,
        cut=_cut(context.intake, body),
        salt=body.cache_salt or "",
        param="input",
    )
    request_id = new_request_id("embd")
    size = NUMBER_BYTES * embedding.size
    asked = pooling_asked(request_id, prompts, Pooling(embedding.kind), body, adapter, size)
    turns = [context.turns.build(request, "embeddings", one) for one in asked]
    results = await context.runner.run_to_end(request, turns)
    vectors = [vector_of(result) for result in results]
    head = {
        "id": request_id,
        "object": "list",
        "created": int(time.time()),
        "model": answered_by(context.engine, adapter),
    }

    def whole() -> Response:
        found = [embedding.finish(vector, body.dimensions, body.normalize) for vector in vectors]
        data = [
            {"object": "embedding", "index": index, "embedding": _written(one, body.encoding_format)}
            for index, one in enumerate(found)
        ]
        return json_response({**head, "data": data, "usage": UsageMeter.of(results).usage()})

    return await context.intake.in_thread(whole)


def vector_of(result: Collected) -> Vector:
    """Return what was pooled. Raises GenerationFailed if the engine gave nothing."""
    if result.pooled is None:
        raise GenerationFailed("the engine ended a request without its vector")
    return result.pooled


def _prompted(given: str | list[Any], before: str) -> str | list[Any]:
    """Return the inputs with `before` put before each text; `completion_prompts` checks what they are."""
    if not before:
        return given
    if isinstance(given, str):
        return before + given if given else given
    return [before + one if isinstance(one, str) and one else one for one in given]


def _cut(intake: Intake, body: EmbeddingRequest) -> PromptCut | None:
    most = body.truncate_prompt_tokens
    if most is None:
        return None
    most = intake.engine.max_model_len - 1 if most == -1 else most
    return PromptCut(most, keep_first=body.truncation_side == "right")


def _written(vector: Vector, encoding: str | None) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode("ascii")
    return vector.tolist()
