"""MindIE's own ``/infer`` and ``/infer_token``: text or token ids in, text and, with ``details``, ids out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.api import GenerationRequest, RequestOutput
from stemma.errors import InvalidRequest
from stemma.server.access import JSON_TYPE
from stemma.server.answers.finish import finish_reason
from stemma.server.answers.usage import cache_detail, cached_header
from stemma.server.apis.context import ApiContext, context_of
from stemma.server.errors import json_response, tgi_error
from stemma.server.generation import new_request_id
from stemma.server.openapi import takes
from stemma.server.requests.body import read_object, validate
from stemma.server.requests.models import chosen_adapter
from stemma.server.requests.prompts import check_tokens, last_tokens, text_prompt
from stemma.server.requests.sampling import tgi_sampling
from stemma.server.routes import EVENTS_TYPE, TENANT, Router
from stemma.server.schemas.mindie import InferParameters, InferRequest
from stemma.server.timed import TimedResult, TimedRun, run_timed, start_timed
from stemma.server.transport.sse import EventStream, event, told_as
from stemma.types import TokenArray, as_tokens

router = Router(tgi_error)


@router.post("/infer", TENANT, sends=(JSON_TYPE, EVENTS_TYPE), openapi_extra=takes(InferRequest))
async def infer(request: Request) -> Response:
    """Continue ``inputs`` or the token ids ``input_id``."""
    return await _infer(request, validate(InferRequest, await read_object(request)))


@router.post("/infer_token", TENANT, openapi_extra=takes(InferRequest))
async def infer_token(request: Request) -> Response:
    """Continue the token ids ``input_id``."""
    body = validate(InferRequest, await read_object(request))
    if body.input_id is None and body.inputs is None:
        raise InvalidRequest("input_id is missing", param="input_id")
    return await _infer(request, body)


async def _infer(request: Request, body: InferRequest) -> Response:
    context = context_of(request)
    if body.inputs is not None and body.input_id is not None:
        raise InvalidRequest("Input conflict: give inputs or input_id, not both", param="input_id")
    if body.inputs is None and body.input_id is None:
        raise InvalidRequest("Contains not prompt or prompt null: give inputs or input_id", param="inputs")
    if body.input_id is not None:
        tokens = token_prompt(context, body.input_id, "input_id", body.parameters)
    else:
        assert body.inputs is not None
        cut = last_tokens(body.parameters.truncate)
        tokens = await text_prompt(context.intake, body.inputs, param="inputs", cut=cut, salt="")
    parameters = body.parameters
    generation = one_sequence(context, "infer", tokens, parameters)
    if body.stream:
        run = await start_timed(context.runner, request, generation, parameters.timeout)
        source = _events(generation, run, parameters)
        return EventStream(source, run.outputs, cached_header(run.cache), told_as(tgi_error))
    result = await run_timed(context.runner, request, generation, parameters.timeout)
    answer: dict[str, Any] = {"generated_text": result.sequence.text}
    if parameters.details:
        reason = finish_reason(result.sequence.finish_reason, result.sequence.stop_reason)
        ids = result.sequence.token_ids
        answer["details"] = _details(generation, reason, ids, len(ids), result)
    return json_response(answer, headers=cached_header(result.cache))


def token_prompt(context: ApiContext, ids: list[int], param: str, parameters: InferParameters) -> TokenArray:
    """Return token ids of a prompt, cut as `truncate` wants it, and checked."""
    return as_tokens(check_tokens(context.intake, ids, param, last_tokens(parameters.truncate)))


def one_sequence(
    context: ApiContext, api: str, tokens: TokenArray, parameters: InferParameters
) -> GenerationRequest:
    """Return the request for the engine; these shapes have a place for one sequence."""
    if parameters.best_of not in (None, 1):
        raise InvalidRequest("best_of is not supported in this shape", param="parameters.best_of")
    for name in ("decoder_input_details", "return_full_text"):
        if getattr(parameters, name):
            raise InvalidRequest(f"{name} is not supported in this shape", param=f"parameters.{name}")
    return GenerationRequest(
        new_request_id(api),
        tokens,
        tgi_sampling(context.intake, parameters),
        adapter=chosen_adapter(context.engine, None, parameters.adapter_id),
        shows_steps=True,
    )


async def _events(
    generation: GenerationRequest, run: TimedRun, parameters: InferParameters
) -> AsyncGenerator[bytes, None]:
    """Yield an event per output; the last one carries the whole text and, if asked for, the details."""
    texts: list[str] = []
    ids: list[int] = []
    async for output in run.each():
        chunks: list[bytes] = []
        for delta in output.deltas:
            texts.append(delta.text)
            ids.extend(delta.token_ids)
            item = run.times.latest() | {"token": {"id": list(delta.token_ids), "text": delta.text}}
            if delta.finish_reason is not None:
                item["generated_text"] = "".join(texts)
                if parameters.details:
                    reason = finish_reason(delta.finish_reason, delta.stop_reason)
                    item["details"] = _details(generation, reason, ids, output.num_generated_tokens, output)
            chunks.append(event(item))
        yield b"".join(chunks)


def _details(
    generation: GenerationRequest,
    reason: str,
    ids: list[int],
    num_generated: int,
    told: RequestOutput | TimedResult,
) -> dict[str, Any]:
    return {
        "finish_reason": reason,
        "generated_tokens": num_generated,
        "generated_token_ids": ids,
        "seed": generation.params.seed,
        "stemma": cache_detail(told.cache, told.queue_wait_s),
    }
