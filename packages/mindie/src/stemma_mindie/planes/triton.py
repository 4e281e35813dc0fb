"""Triton's ``/v2`` as MindIE serves it: infer on token ids, generate on text, stop, metadata.

Tensors come and go as JSON or as bytes (`triton_binary.py`). Errors carry ``error``, as its clients read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma import __version__
from stemma.errors import InvalidRequest, UnknownModel
from stemma.server.answers.finish import finish_reason
from stemma.server.answers.usage import cache_detail, cached_header
from stemma.server.door.access import BYTES_TYPE, JSON_TYPE, owner_of
from stemma.server.errors import json_response, tgi_error
from stemma.server.observe.collected import Collected
from stemma.server.openapi import takes
from stemma.server.routes import EVENTS_TYPE, TENANT, Router
from stemma.server.transport.sse import EventStream, event, told_as
from stemma.server.turn.body import read_object, validate
from stemma.server.turn.build import Turn
from stemma.server.turn.context import ApiContext, context_of
from stemma.server.turn.models import served_names
from stemma.server.turn.outputs import stream_header
from stemma.server.turn.prompts import last_tokens, text_prompt
from stemma_mindie.planes.infer import one_sequence, token_prompt
from stemma_mindie.planes.schemas import (
    InferParameters,
    TritonGenerateRequest,
    TritonInferRequest,
    TritonStopRequest,
)
from stemma_mindie.planes.timed import TimedResult, TimedRun, run_timed, start_timed
from stemma_mindie.planes.triton_binary import binary_outputs, infer_response, read_infer

router = Router(tgi_error, prefix="/v2")
PLATFORM = "stemma"
MINDIE_NAME = "MindIE Server"

_Running = dict[tuple[str, str], set[str]]
"""(owner, client's id) -> request ids of the engine, for `stopInfer`."""


def server_name(context: ApiContext) -> str:
    """Return what this server calls itself; clients of MindIE compare it."""
    return MINDIE_NAME if context.settings.requests.dialect == "mindie" else PLATFORM


@router.get("", TENANT)
async def server_metadata(request: Request) -> Response:
    """Name, version and, as MindIE does, limits."""
    context = context_of(request)
    scheduler = context.settings.engine.scheduler
    extensions: Any = ["generate", "generate_stream", "stop_infer"]
    if context.settings.requests.dialect == "mindie":
        extensions = {
            "max_iter_times": context.settings.requests.max_output_tokens,
            "prefill_policy_type": 0,
            "decode_policy_type": 0,
            "max_prefill_batch_size": scheduler.seats,
            "max_prefill_tokens": scheduler.max_batch_tokens,
        }
    return json_response({"name": server_name(context), "version": __version__, "extensions": extensions})


@router.get("/models/{model}", TENANT)
async def model_metadata(request: Request) -> Response:
    """Inputs and outputs of the model: token ids."""
    context = _checked(request)
    tensor = {"datatype": "UINT32", "shape": [-1]}
    return json_response(
        {
            "name": context.engine.model_name,
            "versions": ["1"],
            "platform": server_name(context),
            "inputs": [{"name": "input0", **tensor}],
            "outputs": [{"name": "output0", **tensor}],
        }
    )


@router.get("/models/{model}/config", TENANT)
async def model_config(request: Request) -> Response:
    """Limits of the model as it is served."""
    context = _checked(request)
    settings = context.settings.engine
    return json_response(
        {
            "model_name": context.engine.model_name,
            "max_seq_len": context.engine.max_model_len,
            "npu_mem_size": _gib(settings.cache.kv_cache_memory, -1),
            "cpu_mem_size": _gib(settings.tiers.host_cache, 0),
            "world_size": 1,
            "model_weight_path": settings.model.path.name,
            "model_instance_type": "Standard",
            "input_datatype": "UINT32",
            "output_datatype": "UINT32",
        }
    )


def _gib(num_bytes: int | None, absent: int) -> int:
    return absent if num_bytes is None else num_bytes // 2**30


@router.post(
    "/models/{model}/infer", TENANT, sends=(JSON_TYPE, BYTES_TYPE), openapi_extra=takes(TritonInferRequest)
)
async def infer(request: Request) -> Response:
    """Continue token ids; the answer is token ids."""
    context = _checked(request)
    raw = await read_infer(request, context.engine.max_model_len)
    body = validate(TritonInferRequest, raw)
    if len(body.inputs) != 1:
        raise InvalidRequest("inputs: exactly one tensor is taken", param="inputs")
    [tensor] = body.inputs
    if tensor.shape not in ([len(tensor.data)], [1, len(tensor.data)]):
        raise InvalidRequest(
            f"inputs[0]: shape {tensor.shape} doesn't fit {len(tensor.data)} values: [1, N] is meant",
            param="inputs[0].shape",
        )
    parameters = tensor.parameters or body.parameters
    tokens = token_prompt(context, tensor.data, "inputs[0].data", parameters)
    names = [output.name for output in body.outputs or ()] or ["output0"]
    turn = one_sequence(context, request, "triton", tokens, parameters, num_lists=len(names))
    with _stoppable(request, body.id, turn):
        result = await run_timed(context.runner, request, turn, parameters.timeout)
    ids = result.sequence.token_ids
    outputs = [{"name": name, "shape": [1, len(ids)], "datatype": "UINT32", "data": ids} for name in names]
    answer: dict[str, Any] = {"model_name": context.engine.model_name, "outputs": outputs}
    if body.id is not None:
        answer["id"] = body.id
    return infer_response(answer, binary_outputs(raw, len(outputs)), cached_header(result.cache))


@router.post("/models/{model}/generate", TENANT, openapi_extra=takes(TritonGenerateRequest))
async def generate(request: Request) -> Response:
    """Continue ``text_input``."""
    context = _checked(request)
    body = validate(TritonGenerateRequest, await read_object(request))
    turn = await _text_request(context, request, body)
    with _stoppable(request, body.id, turn):
        result = await run_timed(context.runner, request, turn, body.parameters.timeout)
    answer = _answer(context, body, result.sequence.text)
    if body.parameters.details:
        reason = finish_reason(result.sequence.finish_reason, result.sequence.stop_reason)
        answer["details"] = _details(reason, len(result.sequence.token_ids), result)
    answer["prefill_time"], answer["decode_time"] = result.times.prefill_ms, result.times.mean_decode_ms
    return json_response(answer, headers=cached_header(result.cache))


@router.post(
    "/models/{model}/generate_stream",
    TENANT,
    sends=(EVENTS_TYPE,),
    openapi_extra=takes(TritonGenerateRequest),
)
async def generate_stream(request: Request) -> Response:
    """Continue ``text_input``, piece by piece."""
    context = _checked(request)
    body = validate(TritonGenerateRequest, await read_object(request))
    turn = await _text_request(context, request, body)
    run = await start_timed(context.runner, request, turn, body.parameters.timeout)
    source = _events(request, context, body, turn, run)
    return EventStream(source, run.outputs, stream_header(run.outputs), told_as(tgi_error))


@router.post("/models/{model}/stopInfer", TENANT, metered=False, openapi_extra=takes(TritonStopRequest))
async def stop_infer(request: Request) -> Response:
    """End the running requests that the same client sent under ``id``; their answers end there."""
    context = _checked(request)
    body = validate(TritonStopRequest, await read_object(request))
    running = _running(request).get((owner_of(request), body.id))
    if not running:
        raise UnknownModel(f"no request with id {body.id!r} is running", param="id")
    for request_id in tuple(running):
        await context.engine.abort(request_id)
    return json_response({"id": body.id})


def _checked(request: Request) -> ApiContext:
    context = context_of(request)
    name: str = request.path_params["model"]
    if name not in served_names(context.engine):
        raise UnknownModel(f"Model {name[:256]} not found.", param="model")
    return context


async def _text_request(context: ApiContext, request: Request, body: TritonGenerateRequest) -> Turn:
    tokens = await text_prompt(
        context.intake,
        body.text_input,
        param="text_input",
        cut=last_tokens(body.parameters.truncate),
        salt="",
    )
    return one_sequence(context, request, "triton", tokens, body.parameters)


def _answer(context: ApiContext, body: TritonGenerateRequest, text: str) -> dict[str, Any]:
    return {
        "id": body.id or "",
        "model_name": context.engine.model_name,
        "model_version": None,
        "text_output": text,
    }


def _details(reason: str, num_generated: int, told: Collected | TimedResult) -> dict[str, Any]:
    return {
        "finish_reason": reason,
        "generated_tokens": num_generated,
        "first_token_cost": None,
        "decode_cost": None,
        "queue_wait_time": round(1e6 * told.queue_wait_s),
        "stemma": cache_detail(told.cache, told.queue_wait_s),
    }


async def _events(
    request: Request,
    context: ApiContext,
    body: TritonGenerateRequest,
    turn: Turn,
    run: TimedRun,
) -> AsyncGenerator[bytes, None]:
    parameters: InferParameters = body.parameters
    with _stoppable(request, body.id, turn):
        async for output in run.each():
            chunks: list[bytes] = []
            for delta in output.deltas:
                item = _answer(context, body, delta.text)
                if delta.finish_reason is not None and parameters.details:
                    reason = finish_reason(delta.finish_reason, delta.stop_reason)
                    item["details"] = _details(reason, output.num_generated_tokens, run.outputs.answers[0])
                chunks.append(event(item | run.times.latest()))
            yield b"".join(chunks)


@contextmanager
def _stoppable(request: Request, client_id: str | None, turn: Turn) -> Iterator[None]:
    """Let `stopInfer` find a request while it runs."""
    if client_id is None:
        yield
        return
    running = _running(request)
    key = (owner_of(request), client_id)
    running.setdefault(key, set()).add(turn.request.request_id)
    try:
        yield
    finally:
        left = running[key]
        left.discard(turn.request.request_id)
        if not left:
            del running[key]


def _running(request: Request) -> _Running:
    state = request.app.state
    if not hasattr(state, "triton_running"):
        state.triton_running = {}
    found: _Running = state.triton_running
    return found
