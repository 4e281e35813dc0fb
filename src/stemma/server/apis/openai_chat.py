"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.api import SequenceDelta
from stemma.server.answers.chat import AnswerReader, delta_of, message_of
from stemma.server.answers.events import CallStart, Content, Event, Reasoning
from stemma.server.answers.logprobs import chat_logprobs, keep_best
from stemma.server.answers.prompt_logprobs import id_list, vllm_prompt_logprobs
from stemma.server.answers.usage import SYSTEM_FINGERPRINT, UsageMeter
from stemma.server.door.access import JSON_TYPE
from stemma.server.errors import json_response, openai_error
from stemma.server.observe.collected import Collected
from stemma.server.openapi import takes
from stemma.server.routes import EVENTS_TYPE, TENANT, Router
from stemma.server.schemas.functions import in_function_words
from stemma.server.schemas.openai import ChatRequest
from stemma.server.transport.sse import DONE, EventStream, TextEvent, event, told_as
from stemma.server.turn.body import read_object, validate
from stemma.server.turn.build import Turn
from stemma.server.turn.chat import ChatAsked, chat_turn
from stemma.server.turn.context import ApiContext, context_of
from stemma.server.turn.models import answered_by
from stemma.server.turn.outputs import OutputStream, stream_header
from stemma.server.turn.run import new_request_id
from stemma.types import FinishReason

router = Router(openai_error)


@router.post("/v1/chat/completions", TENANT, sends=(JSON_TYPE, EVENTS_TYPE), openapi_extra=takes(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation."""
    context = context_of(request)
    body = validate(ChatRequest, await read_object(request))
    turn = await chat_turn(context, request, ChatAsked(new_request_id("chatcmpl"), "chat", body))
    if body.stream:
        outputs = await context.runner.start(request, [turn])
        head = _head(context, turn, "chat.completion.chunk")
        source = _events(context, body, turn, outputs, head)
        if body.return_progress:
            choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
            outputs.tell_as_events({**head, "choices": [choice]})
        return EventStream(source, outputs, stream_header(outputs), told_as(openai_error, DONE))
    [result] = await context.runner.run_to_end(request, [turn])
    if body.prompt_logprobs is None and not body.logprobs:
        return json_response(_completion(context, body, turn, result))
    return await context.intake.in_thread(lambda: json_response(_completion(context, body, turn, result)))


def _completion(context: ApiContext, body: ChatRequest, turn: Turn, result: Collected) -> dict[str, Any]:
    reader = turn.reader
    extra: dict[str, Any] = {}
    if result.prompt_logprobs is not None and body.prompt_logprobs is not None:
        extra["prompt_logprobs"] = vllm_prompt_logprobs(
            context.token_text, result.prompt_logprobs, body.prompt_logprobs
        )
    if body.return_token_ids:
        extra["prompt_token_ids"] = id_list(turn.request.vocabulary_ids)
    choices = []
    for index, sequence in enumerate(keep_best(result.sequences, body.n or 1)):
        answer = reader.read(sequence.text)
        choices.append(
            {
                "index": index,
                "message": message_of(answer, reader.format.tools),
                "logprobs": chat_logprobs(context.token_text, sequence.logprobs) if body.logprobs else None,
                "finish_reason": _finish_reason(sequence.finish_reason, bool(answer.calls)),
                "stop_reason": sequence.stop_reason,
                **({"token_ids": sequence.token_ids} if body.return_token_ids else {}),
            }
        )
    return {
        **_head(context, turn, "chat.completion"),
        "choices": list(map(_wording(body), choices)),
        "usage": UsageMeter.of([result]).usage(),
        **extra,
    }


def _head(context: ApiContext, turn: Turn, kind: str) -> dict[str, Any]:
    return {
        "id": turn.request.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": answered_by(context.engine, turn.request.adapter),
        "system_fingerprint": SYSTEM_FINGERPRINT,
    }


async def _events(
    context: ApiContext, body: ChatRequest, turn: Turn, outputs: OutputStream, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks, which begin as `head`: the role of each choice, the parts, then usage if wanted."""
    reader, request = turn.reader, turn.request
    options = body.stream_options
    with_usage = options is not None and options.include_usage
    with_counts = options is not None and with_usage and options.continuous_usage_stats
    tail: dict[str, Any] = {"usage": None} if with_usage else {}
    worded = _wording(body)

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        return {**head, "choices": [worded(choice)], **tail}

    role = {"role": "assistant", "content": ""}
    with_ids = bool(body.return_token_ids)
    # A chunk that is the same but for its text is written once, unless its counts change.
    is_plain = not (with_ids or with_counts)
    streams = [_ChoiceStream(context, i, reader, chunk, with_ids, is_plain) for i in range(request.params.n)]
    ids = {"prompt_token_ids": id_list(request.vocabulary_ids)} if with_ids else {}
    chunks = [event(chunk(stream.choice(role)) | ids) for stream in streams]
    async for _, output in outputs:
        if with_counts:
            tail["usage"] = UsageMeter.of(outputs.answers).counts()
        for delta in output.deltas:
            chunks += streams[delta.index].events(delta)
        if chunks:
            yield b"".join(chunks)
            chunks.clear()
    with_end = with_usage or bool(turn.receipt)
    usage = UsageMeter.of(outputs.answers).usage() if with_end else None
    yield (event({**head, "choices": [], "usage": usage}) if with_end else b"") + DONE


class _ChoiceStream:
    """One choice of a streamed answer."""

    def __init__(
        self,
        context: ApiContext,
        index: int,
        reader: AnswerReader,
        chunk: Callable[[dict[str, Any]], dict[str, Any]],
        with_ids: bool,
        is_plain: bool,
    ) -> None:
        """`chunk` returns what an event with this choice carries.

        `is_plain`: nothing in it but the text changes from one to the next.
        """
        self._is_plain = is_plain
        self._context = context
        self._chunk = chunk
        self._with_ids = with_ids
        self._index = index
        self._reader = reader
        self._parser = reader.parser()
        self._has_calls = False
        self._content = TextEvent(lambda text: chunk(self.choice({"content": text})))

    def choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return a choice that holds nothing but `delta`."""
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def events(self, delta: SequenceDelta) -> list[bytes]:
        """Return the events of what a step gave."""
        ended = delta.finish_reason is not None
        parts = self._parser.feed(delta.text) + (self._parser.end() if ended else [])
        if len(parts) == 1 and self._is_plain and not (ended or delta.logprobs is not None):
            match parts[0]:
                case Content(text):  # nearly every token
                    return [self._content(text)]
        return [event(self._chunk(choice)) for choice in self._choices(delta, parts)]

    def _choices(self, delta: SequenceDelta, events: list[Event]) -> list[dict[str, Any]]:
        """Return the choices of `events`: log-probabilities with the first, the end with the last."""
        ended = delta.finish_reason is not None
        found = [self.choice(part) for part in map(self._delta, events) if part]
        if delta.logprobs or ended or (self._with_ids and delta.token_ids):
            found = found or [self.choice({})]
        if self._with_ids and found:
            found[0]["token_ids"] = list(delta.token_ids)
        if delta.logprobs is not None and found:
            found[0]["logprobs"] = chat_logprobs(self._context.token_text, delta.logprobs)
        if ended:
            found[-1]["finish_reason"] = _finish_reason(delta.finish_reason, self._has_calls)
            found[-1]["stop_reason"] = delta.stop_reason
        return found

    def _delta(self, part: Event) -> dict[str, Any]:
        self._has_calls = self._has_calls or isinstance(part, CallStart)
        if isinstance(part, Reasoning) and not self._reader.with_reasoning:
            return {}
        return delta_of(part, self._reader.format.tools)


def _wording(body: ChatRequest) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what words a choice as the request words its tools."""
    return in_function_words if body.functions else lambda choice: choice


def _finish_reason(reason: FinishReason | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason is FinishReason.STOP else reason
