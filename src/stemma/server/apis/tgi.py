"""TGI's ``/generate``, ``/generate_stream`` and ``/``, as MindIE serves them; cached counts in a header.

The shape has no place for cached tokens: they are in the header ``x-stemma-cached-tokens``, and with
``details`` also in ``details.stemma``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma import __version__
from stemma.errors import InvalidRequest
from stemma.server.answers.finish import finish_reason
from stemma.server.answers.logprobs import FLOOR, keep_best
from stemma.server.answers.usage import cache_detail, cached_header
from stemma.server.apis.tgi_tokens import stream_tokens, token_entry
from stemma.server.apis.vllm_generate import generate_vllm
from stemma.server.door.access import JSON_TYPE
from stemma.server.door.answer_memory import ENTRY_BYTES, PromptTold, text_bytes
from stemma.server.errors import json_response, tgi_error
from stemma.server.observe.collected import Collected, CollectedSequence
from stemma.server.openapi import takes
from stemma.server.routes import EVENTS_TYPE, TENANT, Router
from stemma.server.schemas.tgi import TGIParameters, TGIRequest, VLLMGenerateRequest
from stemma.server.transport.sse import EventStream, event, told_as
from stemma.server.turn.body import read_object, validate
from stemma.server.turn.build import Asked, Prompt, Turn
from stemma.server.turn.context import ApiContext, context_of
from stemma.server.turn.models import chosen_adapter
from stemma.server.turn.outputs import OutputStream, stream_header
from stemma.server.turn.prompts import last_tokens, text_prompt
from stemma.server.turn.run import new_request_id
from stemma.server.turn.sampling import tgi_sampling, widen_to_best_of
from stemma.types import TokenArray

router = Router(tgi_error)

NEITHER_SHAPE = {
    "error": {
        "Error": "`inputs` or `prompt` must be necessary and data type must be string",
        "error_type": "validation",
    }
}


@router.post(
    "/generate", TENANT, sends=(JSON_TYPE, EVENTS_TYPE), openapi_extra=takes(TGIRequest, VLLMGenerateRequest)
)
async def generate(request: Request) -> Response:
    """Continue ``inputs`` (TGI's shape) or ``prompt`` (vLLM's)."""
    body = await read_object(request)
    if "prompt" in body:
        return await generate_vllm(request, body)
    if "inputs" not in body:
        return json_response(NEITHER_SHAPE, 422)
    return await _generate_whole(request, validate(TGIRequest, body), in_list=False)


@router.post("/generate_stream", TENANT, sends=(EVENTS_TYPE,), openapi_extra=takes(TGIRequest))
async def generate_stream(request: Request) -> Response:
    """Continue ``inputs``, token by token."""
    return await _generate_stream(request, validate(TGIRequest, await read_object(request)))


@router.post("/", TENANT, sends=(JSON_TYPE, EVENTS_TYPE), openapi_extra=takes(TGIRequest))
async def generate_at_root(request: Request) -> Response:
    """Continue ``inputs``; ``stream`` in the body chooses how. A whole answer comes in a list of one."""
    body = validate(TGIRequest, await read_object(request))
    if body.stream:
        return await _generate_stream(request, body)
    return await _generate_whole(request, body, in_list=True)


@router.get("/info", TENANT)
async def info(request: Request) -> Response:
    """The fields of TGI's `/info` that apply here."""
    context = context_of(request)
    settings, engine = context.settings, context.engine
    scheduler, longest = settings.engine.scheduler, settings.requests.max_input_tokens
    return json_response(
        {
            "docker_label": None,
            "version": __version__,
            "max_batch_total_tokens": scheduler.max_batch_tokens,
            "max_best_of": scheduler.seats,
            "max_concurrent_requests": scheduler.max_waiting + scheduler.seats,
            "max_stop_sequences": None,
            "max_waiting_tokens": None,
            "sha": None,
            "validation_workers": None,
            "waiting_served_ratio": None,
            "models": [
                {
                    "model_device_type": settings.engine.model.device,
                    "model_dtype": settings.engine.model.dtype,
                    "model_id": engine.model_name,
                    "model_pipeline_tag": "text-generation",
                    "model_sha": None,
                    "max_total_tokens": engine.max_model_len,
                }
            ],
            "model_id": engine.model_name,
            "max_total_tokens": engine.max_model_len,
            "max_input_length": min(longest or engine.max_model_len, engine.max_model_len - 1),
        }
    )


async def _prepare(
    context: ApiContext, request: Request, body: TGIRequest, *, stream: bool
) -> tuple[Turn, str]:
    """Return the turn, and the text of its prompt."""
    adapter = chosen_adapter(context.engine, body.model, body.parameters.adapter_id)
    text = body.inputs if isinstance(body.inputs, str) else _join_parts(body.inputs)
    params = tgi_sampling(context.intake, body.parameters)
    params = widen_to_best_of(context.intake, params, body.parameters.best_of, stream=stream)
    context.runner.expect(params.n)
    cut = last_tokens(body.parameters.truncate)
    tokens = await text_prompt(context.intake, text, param="inputs", cut=cut, salt="")
    asked = Asked(
        request_id=new_request_id("tgi"),
        prompt=Prompt(tokens),
        params=params,
        adapter=adapter,
        shows_steps=True,
        told=_told(body.parameters, tokens, text, stream=stream),
    )
    return context.turns.build(request, "tgi", asked), text


def _told(parameters: TGIParameters, prompt: TokenArray, text: str, *, stream: bool) -> PromptTold:
    """Return what the answer tells beside its text."""
    prefill = ENTRY_BYTES * len(prompt) if parameters.decoder_input_details else 0
    repeated = text_bytes(text) if parameters.return_full_text else 0
    tokens = ENTRY_BYTES if parameters.details or parameters.decoder_input_details or stream else 0
    return PromptTold(once=prefill + repeated, token=tokens)


def _join_parts(parts: list[dict[str, Any]]) -> str:
    if not all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise InvalidRequest("inputs: only text is supported", param="inputs")
    return "".join(part["text"] for part in parts)


async def _generate_whole(request: Request, body: TGIRequest, *, in_list: bool) -> Response:
    context = context_of(request)
    turn, text = await _prepare(context, request, body, stream=False)
    [result] = await context.runner.run_to_end(request, [turn])
    [sequence] = keep_best(result.sequences, 1)
    answer: dict[str, Any] = {"generated_text": _full_text(body.parameters, text, sequence.text)}
    if body.parameters.details or body.parameters.decoder_input_details:
        answer["details"] = _details(context, turn, result, sequence, body.parameters)
    return json_response([answer] if in_list else answer, headers=cached_header(result.cache))


def _full_text(parameters: TGIParameters, prompt: str, generated: str) -> str:
    return prompt + generated if parameters.return_full_text else generated


def _details(
    context: ApiContext,
    turn: Turn,
    result: Collected,
    sequence: CollectedSequence,
    parameters: TGIParameters,
) -> dict[str, Any]:
    prefill: list[dict[str, Any]] = []
    if parameters.decoder_input_details:
        prefill = [_token(context, token_id) for token_id in turn.request.prompt_token_ids.tolist()]
        if result.prompt_logprobs is not None:
            for entry, logprob in zip(prefill[1:], result.prompt_logprobs.logprobs.tolist(), strict=True):
                entry["logprob"] = max(logprob, FLOOR)
    return {
        "prompt_tokens": len(turn.request.prompt_token_ids),
        "finish_reason": finish_reason(sequence.finish_reason, sequence.stop_reason),
        "generated_tokens": len(sequence.token_ids),
        "prefill": prefill,
        "seed": turn.request.params.seed,
        "tokens": _tokens(context, sequence),
        "stemma": cache_detail(result.cache, result.queue_wait_s),
    }


def _tokens(context: ApiContext, sequence: CollectedSequence) -> list[dict[str, Any]]:
    if not sequence.logprobs:
        return [_token(context, token_id) for token_id in sequence.token_ids]
    return [_token(context, entry.token_id, entry.logprob) for entry in sequence.logprobs]


def _token(context: ApiContext, token_id: int, logprob: float | None = None) -> dict[str, Any]:
    return token_entry(context, token_id, logprob, context.token_text(token_id))


async def _generate_stream(request: Request, body: TGIRequest) -> Response:
    if body.parameters.decoder_input_details:
        raise InvalidRequest(
            "the decoder_input_details must not be true when stream is true",
            param="parameters.decoder_input_details",
        )
    context = context_of(request)
    turn, text = await _prepare(context, request, body, stream=True)
    outputs = await context.runner.start(request, [turn])
    source = _events(context, body.parameters, turn, text, outputs)
    return EventStream(source, outputs, stream_header(outputs), told_as(tgi_error))


async def _events(
    context: ApiContext,
    parameters: TGIParameters,
    turn: Turn,
    prompt: str,
    outputs: OutputStream,
) -> AsyncGenerator[bytes, None]:
    """Yield an event per token; the last one carries the whole text and, if asked for, the details."""
    texts: list[str] = []
    index = 0
    async for _, output in outputs:
        chunks: list[bytes] = []
        for delta in output.deltas:
            texts.append(delta.text)
            tokens = stream_tokens(context, delta)
            for token in tokens:
                index += 1
                item: dict[str, Any] = {
                    "index": index,
                    "token": token,
                    "generated_text": None,
                    "details": None,
                }
                if delta.finish_reason is not None and token is tokens[-1]:
                    item["generated_text"] = _full_text(parameters, prompt, "".join(texts))
                    if parameters.details:
                        reason = finish_reason(delta.finish_reason, delta.stop_reason)
                        item["details"] = _stream_details(turn, outputs.answers[0], reason)
                chunks.append(event(item))
        if chunks:
            yield b"".join(chunks)


def _stream_details(turn: Turn, answer: Collected, reason: str) -> dict[str, Any]:
    return {
        "prompt_tokens": len(turn.request.prompt_token_ids),
        "input_length": len(turn.request.prompt_token_ids),
        "finish_reason": reason,
        "generated_tokens": answer.num_generated_tokens,
        "seed": turn.request.params.seed,
        "stemma": cache_detail(answer.cache, answer.queue_wait_s),
    }
