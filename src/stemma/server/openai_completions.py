"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.api import CacheReport
from stemma.errors import InvalidRequest, StemmaError
from stemma.server.beam import beam_params
from stemma.server.best_of import keep_best
from stemma.server.body import read_object, validate
from stemma.server.context import ServerContext, context_of, new_request_id
from stemma.server.errors import OpenAIRoute, json_response, openai_error_body
from stemma.server.generation import Collected, OutputStream, run_to_end, start
from stemma.server.logprobs import CompletionLogprobs
from stemma.server.openapi import takes
from stemma.server.prompts import check_model, completion_prompts
from stemma.server.retention import generation_request
from stemma.server.sampling import completion_sampling, widen_to_best_of
from stemma.server.schemas.openai import CompletionRequest
from stemma.server.sse import DONE, EventStream, event
from stemma.server.usage import UsageMeter
from stemma.types import FinishReason, TokenArray

router = APIRouter(route_class=OpenAIRoute)


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continue one or many prompts; choices come prompt by prompt, n each."""
    context = context_of(request)
    body = validate(CompletionRequest, await read_object(request))
    check_model(context, body.model)
    params = completion_sampling(context, body)
    beam = beam_params(body, params.n, body.best_of)
    wide = params
    if beam is None:
        wide = widen_to_best_of(context, params, body.best_of, stream=bool(body.stream))
    prompts = await completion_prompts(
        context,
        body.prompt,
        add_special_tokens=body.add_special_tokens is not False,
        keep_last=body.truncate_prompt_tokens,
    )
    response_id = new_request_id("cmpl")
    generations = [
        generation_request(f"{response_id}-{index}", tokens, wide, body, beam)
        for index, tokens in enumerate(prompts)
    ]
    echoes = await _echoes(context, body, prompts)
    reply = _Reply(context, body, response_id, params.n, echoes)
    if body.max_tokens == 0:
        return _echo_only(reply, body, prompts)
    if body.stream:
        outputs = await start(context, request, generations, "completions")
        return EventStream(reply.events(outputs), outputs)
    results = await run_to_end(context, request, generations, "completions")
    choices = [
        reply.choice(
            index * params.n + number,
            echoes[index] + sequence.text,
            CompletionLogprobs(context).render(sequence.logprobs) if body.logprobs is not None else None,
            sequence.finish_reason,
            sequence.stop_reason,
        )
        for index, result in enumerate(results)
        for number, sequence in enumerate(keep_best(result.sequences, params.n))
    ]
    return json_response({**reply.head, "choices": choices, "usage": UsageMeter.of(results).usage()})


def _echo_only(reply: _Reply, body: CompletionRequest, prompts: list[TokenArray]) -> Response:
    """Answer ``echo`` with ``max_tokens`` 0: the prompts, and nothing computed."""
    if body.stream:
        raise InvalidRequest("max_tokens of 0 can't be streamed", param="max_tokens")
    meter = UsageMeter.of(Collected(CacheReport(len(tokens)), []) for tokens in prompts)
    choices = [
        reply.choice(index, echo, None, FinishReason.LENGTH, None)
        for index, echo in enumerate(echo for echo in reply.echoes for _ in range(reply.n))
    ]
    return json_response({**reply.head, "choices": choices, "usage": meter.usage()})


async def _echoes(context: ServerContext, body: CompletionRequest, prompts: list[TokenArray]) -> list[str]:
    """Return what precedes each prompt's text: the prompt itself if ``echo`` is set."""
    if not body.echo:
        return [""] * len(prompts)
    if body.truncate_prompt_tokens is None:
        if isinstance(body.prompt, str):
            return [body.prompt]
        if isinstance(body.prompt[0], str):
            return list(body.prompt)
    decode = context.engine.tokenizer.decode
    return await context.in_thread(lambda: [decode(tokens.tolist()) for tokens in prompts])


class _Reply:
    """What all chunks and choices of one response share."""

    def __init__(
        self, context: ServerContext, body: CompletionRequest, response_id: str, n: int, echoes: list[str]
    ) -> None:
        self._context = context
        self.n = n
        self.echoes = echoes
        self._with_logprobs = body.logprobs is not None
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self.head: dict[str, Any] = {
            "id": response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": context.engine.model_name,
        }

    def choice(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        """Return one entry of ``choices``."""
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    async def events(self, outputs: OutputStream) -> AsyncGenerator[bytes, None]:
        """Yield the chunks: echoes first, then text, then usage if asked for."""
        tail: dict[str, Any] = {"usage": None} if self._with_usage else {}
        meter = UsageMeter()
        logprobs: dict[int, CompletionLogprobs] = {}
        chunks = [
            event({**self.head, "choices": [self.choice(index, echo, None, None, None)], **tail})
            for index, echo in enumerate(echo for echo in self.echoes for _ in range(self.n))
            if echo
        ]
        try:
            async for prompt_index, output in outputs:
                meter.seen(prompt_index, output)
                for delta in output.deltas:
                    if not (delta.text or delta.logprobs or delta.finish_reason is not None):
                        continue
                    index = prompt_index * self.n + delta.index
                    pieces = None
                    if self._with_logprobs:
                        writer = logprobs.setdefault(index, CompletionLogprobs(self._context))
                        pieces = writer.render(delta.logprobs or ())
                    choice = self.choice(index, delta.text, pieces, delta.finish_reason, delta.stop_reason)
                    chunks.append(event({**self.head, "choices": [choice], **tail}))
                if chunks:
                    yield b"".join(chunks)
                    chunks.clear()
        except StemmaError as error:
            yield event(openai_error_body(error)[1]) + DONE
            return
        last = event({**self.head, "choices": [], "usage": meter.usage()}) if self._with_usage else b""
        yield last + DONE
