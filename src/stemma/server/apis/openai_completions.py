"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.api import RequestOutput, SequenceDelta
from stemma.errors import InvalidRequest
from stemma.server.access import JSON_TYPE
from stemma.server.answers.logprobs import CompletionLogprobs, TextOf, keep_best
from stemma.server.answers.prompt_logprobs import entries, vllm_prompt_logprobs
from stemma.server.answers.usage import SYSTEM_FINGERPRINT, UsageMeter
from stemma.server.errors import json_response, openai_error
from stemma.server.observe.collected import Collected, CollectedSequence
from stemma.server.openapi import takes
from stemma.server.routes import EVENTS_TYPE, TENANT, Router
from stemma.server.schemas.openai import CompletionRequest
from stemma.server.transport.sse import DONE, EventStream, TextEvent, event, told_as
from stemma.server.turn.body import read_object, validate
from stemma.server.turn.build import Asked, Prompt
from stemma.server.turn.context import ApiContext, context_of
from stemma.server.turn.hints import hints_of
from stemma.server.turn.models import answered_by, check_model
from stemma.server.turn.outputs import OutputStream, stream_header
from stemma.server.turn.prompts import completion_prompts, wanted_cut
from stemma.server.turn.run import new_request_id
from stemma.server.turn.sampling import candidates, completion_sampling
from stemma.types import FinishReason, TokenArray

router = Router(openai_error)


@router.post(
    "/v1/completions", TENANT, sends=(JSON_TYPE, EVENTS_TYPE), openapi_extra=takes(CompletionRequest)
)
async def create_completion(request: Request) -> Response:
    """Continue one or many prompts; choices come prompt by prompt, n each."""
    context = context_of(request)
    body = validate(CompletionRequest, await read_object(request))
    adapter = check_model(context.engine, body.model)
    params = completion_sampling(context.intake, body)
    wide, beam = candidates(context.intake, body, params)
    prompts = await completion_prompts(
        context.intake,
        body.prompt,
        add_special_tokens=body.add_special_tokens is not False,
        cut=wanted_cut(body),
        salt=body.cache_salt or "",
    )
    response_id = new_request_id("cmpl")
    hints = hints_of(body)
    turns = [
        context.turns.build(
            request,
            "completions",
            Asked(
                request_id=f"{response_id}-{index}",
                prompt=Prompt(tokens),
                params=wide,
                hints=hints,
                adapter=adapter,
                beam=beam,
            ),
        )
        for index, tokens in enumerate(prompts)
    ]
    echoes = await _echoes(context, body, prompts)
    model = answered_by(context.engine, adapter)
    reply = _Reply(context.token_text, model, body, response_id, params.n, echoes)
    if body.max_tokens == 0 and body.stream:
        raise InvalidRequest("max_tokens of 0 can't be streamed", param="max_tokens")
    if body.max_tokens == 0 and params.prompt_logprobs is None:
        return _echo_only(reply, prompts)
    if body.stream:
        outputs = await context.runner.start(request, turns)
        told = told_as(openai_error, DONE)
        if body.return_progress:
            outputs.tell_as_events({**reply.head, "choices": []})
        return EventStream(reply.events(outputs, prompts), outputs, stream_header(outputs), told)
    results = await context.runner.run_to_end(request, turns)
    if params.prompt_logprobs is None:
        return json_response(reply.whole(prompts, results))
    return await context.intake.in_thread(lambda: json_response(reply.whole(prompts, results)))


def _echo_only(reply: _Reply, prompts: list[TokenArray]) -> Response:
    """Answer ``echo`` with ``max_tokens`` 0: the prompts, and nothing computed."""
    meter = UsageMeter.of(Collected.nothing(len(tokens)) for tokens in prompts)
    choices = [
        reply.choice(
            number * reply.n + copy,
            reply.echoes[number],
            None,
            SequenceDelta(copy, (), "", finish_reason=FinishReason.LENGTH),
            tokens,
        )
        for number, tokens in enumerate(prompts)
        for copy in range(reply.n)
    ]
    return json_response({**reply.head, "choices": choices, "usage": meter.usage()})


async def _echoes(context: ApiContext, body: CompletionRequest, prompts: list[TokenArray]) -> list[str]:
    """Return what precedes each prompt's text: the prompt itself if ``echo`` is set."""
    if not body.echo:
        return [""] * len(prompts)
    if body.truncate_prompt_tokens is None:
        if isinstance(body.prompt, str):
            return [body.prompt]
        if isinstance(body.prompt[0], str):
            return list(body.prompt)
    decode = context.engine.tokenizer.decode
    return await context.intake.in_thread(lambda: [decode(tokens.tolist()) for tokens in prompts])


class _Reply:
    """Fields that all chunks and choices of one response share."""

    def __init__(
        self,
        text_of: TextOf,
        model: str,
        body: CompletionRequest,
        response_id: str,
        n: int,
        echoes: list[str],
    ) -> None:
        self._text_of = text_of
        self._body = body
        self.n = n
        self.echoes = echoes
        self._echoes_logprobs = body.echo and body.logprobs is not None
        options = body.stream_options
        self._with_usage = options is not None and options.include_usage
        self._with_counts = self._with_usage and options is not None and options.continuous_usage_stats
        self.head: dict[str, Any] = {
            "id": response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def choice(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        part: SequenceDelta | CollectedSequence,
        prompt: TokenArray | None = None,
    ) -> dict[str, Any]:
        """Return one entry of ``choices``; `prompt` where its ids go with this one, if they are asked for."""
        ids: dict[str, Any] = {}
        if self._body.return_token_ids:
            ids = {} if prompt is None else {"prompt_token_ids": prompt.tolist()}
            ids["token_ids"] = list(part.token_ids)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            **ids,
        }

    def whole(self, prompts: list[TokenArray], results: list[Collected]) -> dict[str, Any]:
        """Return the answer that isn't streamed."""
        choices = []
        for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            extra: dict[str, Any] = {}
            if self._body.prompt_logprobs is not None and result.prompt_logprobs is not None:
                num_top, found = self._body.prompt_logprobs, result.prompt_logprobs
                extra["prompt_logprobs"] = vllm_prompt_logprobs(self._text_of, found, num_top)
            for copy, sequence in enumerate(keep_best(result.sequences, self.n)):
                logprobs = None
                if self._body.logprobs is not None:
                    logprobs = self._all_logprobs(result, sequence)
                text = self.echoes[number] + sequence.text
                choice = self.choice(number * self.n + copy, text, logprobs, sequence, prompt)
                choices.append({**choice, **extra})
        return {**self.head, "choices": choices, "usage": UsageMeter.of(results).usage()}

    def _all_logprobs(self, result: Collected, sequence: CollectedSequence) -> dict[str, Any]:
        writer = CompletionLogprobs(self._text_of)
        if not self._echoes_logprobs or result.prompt_logprobs is None:
            return writer.render(sequence.logprobs)
        before = entries(result.prompt_logprobs, self._body.logprobs or 0)
        first = int(result.prompt_logprobs.token_ids[0])
        return writer.render((*before, *sequence.logprobs), first)

    def _echo(
        self, number: int, prompt: TokenArray, output: RequestOutput | None
    ) -> Iterator[tuple[dict[str, Any], CompletionLogprobs]]:
        """Yield what precedes each answer to prompt `number`, and the writer of its log-probabilities."""
        for copy in range(self.n):
            writer, pieces = CompletionLogprobs(self._text_of), None
            if output is not None and output.prompt_logprobs is not None:
                found = output.prompt_logprobs
                pieces = writer.render(entries(found, self._body.logprobs or 0), int(found.token_ids[0]))
            index = number * self.n + copy
            before = SequenceDelta(copy, (), "")
            yield self.choice(index, self.echoes[number], pieces, before, prompt), writer

    def _text_body(self, index: int, tail: dict[str, Any], text: str) -> dict[str, Any]:
        choice = self.choice(index, text, None, SequenceDelta(index, (), text))
        return {**self.head, "choices": [choice], **tail}

    async def events(self, outputs: OutputStream, prompts: list[TokenArray]) -> AsyncGenerator[bytes, None]:
        """Yield the chunks: echoes and ids of the prompts first, then text, then usage if asked for."""
        tail: dict[str, Any] = {"usage": None} if self._with_usage else {}
        logprobs: dict[int, CompletionLogprobs] = {}
        chunks: list[bytes] = []
        texts: dict[int, TextEvent] = {}
        has_more = self._body.logprobs is not None or self._body.return_token_ids or self._with_counts
        has_text_alone = not has_more
        opened: set[int] = set()
        if not self._echoes_logprobs:
            opened = set(range(len(prompts)))
            chunks += [
                event({**self.head, "choices": [choice], **tail})
                for number, prompt in enumerate(prompts)
                if self.echoes[number] or self._body.return_token_ids
                for choice, _ in self._echo(number, prompt, None)
            ]
        async for prompt_index, output in outputs:
            if self._with_counts:
                tail["usage"] = UsageMeter.of(outputs.answers).counts()
            if prompt_index not in opened:
                opened.add(prompt_index)
                for choice, writer in self._echo(prompt_index, prompts[prompt_index], output):
                    logprobs[choice["index"]] = writer
                    chunks.append(event({**self.head, "choices": [choice], **tail}))
            for delta in output.deltas:
                if has_text_alone and delta.finish_reason is None:
                    if delta.text:
                        index = prompt_index * self.n + delta.index
                        if index not in texts:
                            texts[index] = TextEvent(partial(self._text_body, index, tail))
                        chunks.append(texts[index](delta.text))
                    continue
                has_ids = self._body.return_token_ids and delta.token_ids
                if not (delta.text or delta.logprobs or has_ids or delta.finish_reason is not None):
                    continue
                index = prompt_index * self.n + delta.index
                pieces = None
                if self._body.logprobs is not None:
                    writer = logprobs.setdefault(index, CompletionLogprobs(self._text_of))
                    pieces = writer.render(delta.logprobs or ())
                choice = self.choice(index, delta.text, pieces, delta)
                chunks.append(event({**self.head, "choices": [choice], **tail}))
            if chunks:
                yield b"".join(chunks)
                chunks.clear()
        last = b""
        if self._with_usage:
            usage = UsageMeter.of(outputs.answers).usage()
            last = event({**self.head, "choices": [], "usage": usage})
        yield last + DONE
