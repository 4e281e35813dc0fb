"""``/generate`` in vLLM's shape: ``{"prompt": ...}`` -> ``{"text": [prompt + output, ...]}``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from stemma.server.answers.logprobs import keep_best
from stemma.server.answers.usage import cached_header
from stemma.server.door.answer_memory import PromptTold, text_bytes
from stemma.server.errors import json_response, tgi_error
from stemma.server.schemas.tgi import VLLMGenerateRequest
from stemma.server.transport.sse import EventStream
from stemma.server.turn.body import validate
from stemma.server.turn.build import Asked, Prompt
from stemma.server.turn.context import context_of
from stemma.server.turn.models import check_model
from stemma.server.turn.outputs import OutputStream, stream_header
from stemma.server.turn.prompts import last_tokens, text_prompt
from stemma.server.turn.run import new_request_id
from stemma.server.turn.sampling import candidates, vllm_sampling

_END = b"\0"
"""Ends each piece of a stream in this shape."""


async def generate_vllm(request: Request, raw: dict[str, Any]) -> Response:
    """Answer a body that has a ``prompt``."""
    context = context_of(request)
    body = validate(VLLMGenerateRequest, raw)
    adapter = check_model(context.engine, body.model)
    params = vllm_sampling(context.intake, body)
    wide, beam = candidates(context.intake, body, params)
    context.runner.expect(wide.n if beam is None else beam.width)
    tokens = await text_prompt(
        context.intake, body.prompt, cut=last_tokens(body.truncate_prompt_tokens), salt=""
    )
    asked = Asked(
        request_id=new_request_id("gen"),
        prompt=Prompt(tokens),
        params=wide,
        beam=beam,
        adapter=adapter,
        told=PromptTold(each=text_bytes(body.prompt)),
    )
    turn = context.turns.build(request, "vllm", asked)
    if body.stream:
        outputs = await context.runner.start(request, [turn])
        headers = stream_header(outputs)
        outputs.quiet_s = 0.0  # this shape knows no comments
        return EventStream(_pieces(outputs), outputs, headers, lambda error: _piece(tgi_error.body(error)))
    [result] = await context.runner.run_to_end(request, [turn])
    texts = [body.prompt + sequence.text for sequence in keep_best(result.sequences, params.n)]
    return json_response({"text": texts}, headers=cached_header(result.cache))


async def _pieces(outputs: OutputStream) -> AsyncGenerator[bytes, None]:
    """Yield ``{"text": [new text]}`` and a NUL for each output."""
    async for _, output in outputs:
        texts = [delta.text for delta in output.deltas if delta.text]
        if texts:
            yield _piece({"text": texts})


def _piece(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body) + _END
