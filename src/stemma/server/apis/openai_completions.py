"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.api import RequestOutput, SequenceDelta
from stemma.engine.sampling.prompt_logprobs import PromptLogprobs
from stemma.errors import InvalidRequest
from stemma.server.answers.logprobs import CompletionLogprobs, TextOf, keep_best
from stemma.server.answers.prompt_logprobs import entries, id_list, vllm_prompt_logprobs
from stemma.server.answers.usage import SYSTEM_FINGERPRINT, UsageMeter
from stemma.server.door.access import JSON_TYPE
from stemma.server.door.answer_memory import NOTHING_ELSE, PromptTold, text_bytes, told_ids
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
from stemma.server.turn.prompts import completion_prompts, num_prompts, wanted_cut
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
    if body.max_tokens == 0 and body.stream:
        raise InvalidRequest("max_tokens of 0 can't be streamed", param="max_tokens")
    context.runner.expect(num_prompts(body.prompt) * (params.n if beam is None else beam.width))
    prompts = await completion_prompts(
        context.intake,
        body.prompt,
        add_special_tokens=body.add_special_tokens is not False,
        cut=wanted_cut(body),
        salt=body.cache_salt or "",
    )
    response_id = new_request_id("cmpl")
    hints = hints_of(body)
    echoes = await _echoes(context, body, prompts)
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
                told=_told(body, tokens, echo),
            ),
        )
        for index, (tokens, echo) in enumerate(zip(prompts, echoes, strict=True))
    ]
    model = answered_by(context.engine, adapter)
    reply = _Reply(context.token_text, model, body, response_id, params.n, echoes)
    if body.max_tokens == 0 and params.prompt_logprobs is None:
        with closing(context.runner.reserve(request, turns)):
            return await context.intake.in_thread(lambda: _echo_only(reply, prompts))
    if body.stream:
        outputs = await context.runner.start(request, turns)
        told = told_as(openai_error, DONE)
        if body.return_progress:
            outputs.tell_as_events({**reply.head, "choices": []})
        return EventStream(reply.events(outputs, prompts), outputs, stream_header(outputs), told)
    results = await context.runner.run_to_end(request, turns)
    if reply.is_plain:
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
            ids,
        )
        for number, ids in enumerate(map(reply.ids, prompts))
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


def _told(body: CompletionRequest, prompt: TokenArray, echo: str) -> PromptTold:
    """Return what each answer to `prompt` repeats."""
    ids = told_ids(prompt) if body.return_token_ids else NOTHING_ELSE
    repeats = body.echo and body.logprobs is not None
    return replace(ids, each=ids.each + text_bytes(echo), repeats_logprobs=repeats)


@dataclass(frozen=True, slots=True)
class _Before:
    """What precedes the log-probabilities of each choice."""

    pieces: dict[str, Any]
    text_of: TextOf
    offset: int
    """Characters of it."""

    def followed_by(self, sequence: CollectedSequence) -> dict[str, Any]:
        """Return it with those of a choice."""
        found = CompletionLogprobs(self.text_of, self.offset).render(sequence.logprobs)
        return {name: self.pieces[name] + one for name, one in found.items()}


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
        asked = (body.logprobs, body.prompt_logprobs)
        self.is_plain = asked == (None, None) and not (body.echo or body.return_token_ids)
        """Text alone: little enough to be written on the event loop."""
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
        logprobs: dict[str, Any] | orjson.Fragment | None,
        part: SequenceDelta | CollectedSequence,
        prompt_ids: orjson.Fragment | None = None,
    ) -> dict[str, Any]:
        """Return one entry of ``choices``; `prompt_ids` where they go with this one."""
        ids: dict[str, Any] = {}
        if self._body.return_token_ids:
            ids = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}
            ids["token_ids"] = list(part.token_ids)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            **ids,
        }

    def ids(self, prompt: TokenArray) -> orjson.Fragment | None:
        """Return the ids of a prompt, which all its choices share, if they are asked for."""
        return id_list(prompt) if self._body.return_token_ids else None

    def whole(self, prompts: list[TokenArray], results: list[Collected]) -> dict[str, Any]:
        """Return the answer that isn't streamed."""
        choices = []
        for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            ids, before = self.ids(prompt), self._before(result.prompt_logprobs)
            for copy, sequence in enumerate(keep_best(result.sequences, self.n)):
                logprobs = None
                if self._body.logprobs is not None:
                    logprobs = before.followed_by(sequence)
                text = self.echoes[number] + sequence.text
                choices.append(self.choice(number * self.n + copy, text, logprobs, sequence, ids))
            if self._body.prompt_logprobs is not None and (found := result.prompt_logprobs) is not None:
                # Once a prompt, with its first choice: they are the same for all.
                shown = vllm_prompt_logprobs(self._text_of, found, self._body.prompt_logprobs)
                choices[number * self.n]["prompt_logprobs"] = shown
        return {**self.head, "choices": choices, "usage": UsageMeter.of(results).usage()}

    def _before(self, found: PromptLogprobs | None) -> _Before:
        """Return the log-probabilities that precede those of each choice, made once a prompt."""
        writer = CompletionLogprobs(self._text_of)
        if not self._echoes_logprobs or found is None:
            return _Before(writer.render(()), self._text_of, 0)
        pieces = writer.render(entries(found, self._body.logprobs or 0), int(found.token_ids[0]))
        return _Before(pieces, self._text_of, writer.offset)

    def _echo(
        self, number: int, prompt: TokenArray, output: RequestOutput | None
    ) -> Iterator[tuple[dict[str, Any], CompletionLogprobs]]:
        """Yield what precedes each answer to prompt `number`, and the writer of its log-probabilities."""
        found = None if output is None else output.prompt_logprobs
        before, ids = self._before(found), self.ids(prompt)
        pieces = None if found is None else orjson.Fragment(orjson.dumps(before.pieces))
        for copy in range(self.n):
            writer = CompletionLogprobs(self._text_of, before.offset)
            index, nothing = number * self.n + copy, SequenceDelta(copy, (), "")
            yield self.choice(index, self.echoes[number], pieces, nothing, ids), writer

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
        if self._with_usage or any("receipts" in one.notes for one in outputs.answers):
            usage = UsageMeter.of(outputs.answers).usage()
            last = event({**self.head, "choices": [], "usage": usage})
        yield last + DONE
