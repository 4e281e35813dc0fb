"""MindIE's own ``/infer`` and ``/infer_token``: text or token ids in, text and, with ``details``, ids out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import InvalidRequest
from stemma.server.answers.finish import finish_reason
from stemma.server.answers.usage import cache_detail, cached_header
from stemma.server.door.access import JSON_TYPE
from stemma.server.door.answer_memory import EVENT_BYTES, ID_BYTES, PromptTold
from stemma.server.errors import json_response, tgi_error
from stemma.server.observe.collected import Collected
from stemma.server.openapi import takes
from stemma.server.routes import EVENTS_TYPE, TENANT, Router
from stemma.server.transport.sse import EventStream, event, told_as
from stemma.server.turn.body import read_object, validate
from stemma.server.turn.build import Asked, Prompt, Turn
from stemma.server.turn.context import ApiContext, context_of
from stemma.server.turn.models import chosen_adapter
from stemma.server.turn.outputs import stream_header
from stemma.server.turn.prompts import check_tokens, last_tokens, text_prompt
from stemma.server.turn.run import new_request_id
from stemma.server.turn.sampling import tgi_sampling
from stemma.types import TokenArray, as_tokens
from stemma_mindie.planes.schemas import InferParameters, InferRequest
from stemma_mindie.planes.timed import TimedResult, TimedRun, run_timed, start_timed

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
    turn = one_sequence(context, request, "infer", tokens, parameters)
    if body.stream:
        run = await start_timed(context.runner, request, turn, parameters.timeout)
        source = _events(turn, run, parameters)
        return EventStream(source, run.outputs, stream_header(run.outputs), told_as(tgi_error))
    result = await run_timed(context.runner, request, turn, parameters.timeout)
    answer: dict[str, Any] = {"generated_text": result.sequence.text}
    if parameters.details:
        reason = finish_reason(result.sequence.finish_reason, result.sequence.stop_reason)
        ids = result.sequence.token_ids
        answer["details"] = _details(turn, reason, ids, len(ids), result)
    return json_response(answer, headers=cached_header(result.cache))


def token_prompt(context: ApiContext, ids: list[int], param: str, parameters: InferParameters) -> TokenArray:
    """Return token ids of a prompt, cut as `truncate` wants it, and checked."""
    return as_tokens(check_tokens(context.intake, ids, param, last_tokens(parameters.truncate)))


def one_sequence(
    context: ApiContext,
    request: Request,
    api: str,
    tokens: TokenArray,
    parameters: InferParameters,
    *,
    num_lists: int = 1,
) -> Turn:
    """Return the turn; these shapes have a place for one sequence, and `num_lists` for its ids."""
    if parameters.best_of not in (None, 1):
        raise InvalidRequest("best_of is not supported in this shape", param="parameters.best_of")
    for name in ("decoder_input_details", "return_full_text"):
        if getattr(parameters, name):
            raise InvalidRequest(f"{name} is not supported in this shape", param=f"parameters.{name}")
    asked = Asked(
        request_id=new_request_id(api),
        prompt=Prompt(tokens),
        params=tgi_sampling(context.intake, parameters),
        adapter=chosen_adapter(context.engine, None, parameters.adapter_id),
        shows_steps=True,
        told=PromptTold(token=num_lists * ID_BYTES + EVENT_BYTES),
    )
    return context.turns.build(request, api, asked)


async def _events(turn: Turn, run: TimedRun, parameters: InferParameters) -> AsyncGenerator[bytes, None]:
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
                    item["details"] = _details(
                        turn, reason, ids, output.num_generated_tokens, run.outputs.answers[0]
                    )
            chunks.append(event(item))
        yield b"".join(chunks)


def _details(
    turn: Turn,
    reason: str,
    ids: list[int],
    num_generated: int,
    told: Collected | TimedResult,
) -> dict[str, Any]:
    return {
        "finish_reason": reason,
        "generated_tokens": num_generated,
        "generated_token_ids": ids,
        "seed": turn.request.params.seed,
        "stemma": cache_detail(told.cache, told.queue_wait_s),
    }
