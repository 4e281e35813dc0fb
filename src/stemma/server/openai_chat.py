"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.api import GenerationRequest, SequenceDelta
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import StemmaError
from stemma.server.beam import beam_params
from stemma.server.best_of import keep_best
from stemma.server.body import read_object, validate
from stemma.server.context import ServerContext, context_of, new_request_id
from stemma.server.errors import OpenAIRoute, json_response, openai_error_body
from stemma.server.generation import Collected, OutputStream, run_to_end, start
from stemma.server.logprobs import chat_logprobs
from stemma.server.prompts import chat_prompt, check_model
from stemma.server.retention import generation_request
from stemma.server.sampling import chat_sampling, widen_to_best_of
from stemma.server.schemas.openai import ChatRequest
from stemma.server.sse import DONE, EventStream, event
from stemma.server.usage import UsageMeter

router = APIRouter(route_class=OpenAIRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation."""
    context = context_of(request)
    body = validate(ChatRequest, await read_object(request))
    check_model(context, body.model)
    params = chat_sampling(context, body)
    beam = beam_params(body, params.n, body.best_of)
    wide = params
    if beam is None:
        wide = widen_to_best_of(context, params, body.best_of, stream=bool(body.stream))
    tokens = await chat_prompt(context, body)
    generation = generation_request(new_request_id("chatcmpl"), tokens, wide, body, beam)
    if body.stream:
        outputs = await start(context, request, [generation], "chat")
        return EventStream(_events(context, body, generation, outputs), outputs)
    [result] = await run_to_end(context, request, [generation], "chat")
    return json_response(_completion(context, generation.request_id, params, result))


def _completion(
    context: ServerContext, response_id: str, params: SamplingParams, result: Collected
) -> dict[str, Any]:
    with_logprobs = params.logprobs is not None
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None},
            "logprobs": chat_logprobs(context, sequence.logprobs) if with_logprobs else None,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        for index, sequence in enumerate(keep_best(result.sequences, params.n))
    ]
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": context.engine.model_name,
        "choices": choices,
        "usage": UsageMeter.of([result]).usage(),
    }


async def _events(
    context: ServerContext, body: ChatRequest, generation: GenerationRequest, outputs: OutputStream
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks: one with the role for each choice, then the text, then usage if asked for."""
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    meter = UsageMeter()
    head: dict[str, Any] = {
        "id": generation.request_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": context.engine.model_name,
    }
    tail: dict[str, Any] = {"usage": None} if with_usage else {}
    role = {"role": "assistant", "content": ""}
    chunks = [
        event({**head, "choices": [_choice(index, role)], **tail}) for index in range(generation.params.n)
    ]
    try:
        async for index, output in outputs:
            meter.seen(index, output)
            chunks.extend(
                event({**head, "choices": [_delta_choice(context, delta)], **tail})
                for delta in output.deltas
                if delta.text or delta.finish_reason is not None or delta.logprobs
            )
            if chunks:
                yield b"".join(chunks)
                chunks.clear()
    except StemmaError as error:
        yield event(openai_error_body(error)[1]) + DONE
        return
    last = event({**head, "choices": [], "usage": meter.usage()}) if with_usage else b""
    yield last + DONE


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta_choice(context: ServerContext, delta: SequenceDelta) -> dict[str, Any]:
    choice = _choice(delta.index, {"content": delta.text} if delta.text else {})
    if delta.logprobs is not None:
        choice["logprobs"] = chat_logprobs(context, delta.logprobs)
    if delta.finish_reason is not None:
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
    return choice
