"""``/v1/messages``: Anthropic's Messages API over the chat engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import GenerationFailed, InvalidRequest
from stemma.server.answers.cache_diagnostics import cache_miss_reason
from stemma.server.answers.usage import history_detail
from stemma.server.apis.messages.blocks import chat_fields
from stemma.server.apis.messages.marks import Mark, marks_of, num_shared, ranges_of
from stemma.server.apis.messages.output import ContentBlocks
from stemma.server.apis.responses.output import new_id
from stemma.server.door.access import JSON_TYPE
from stemma.server.errors import anthropic_error, json_response
from stemma.server.observe.collected import Collected
from stemma.server.observe.explain import explanation_of
from stemma.server.openapi import takes
from stemma.server.routes import EVENTS_TYPE, TENANT, Router
from stemma.server.schemas.messages import CountTokensRequest, InputTurn, MessagesRequest
from stemma.server.schemas.openai import ChatRequest
from stemma.server.transport.sse import EventStream, event
from stemma.server.turn.body import read_object, validate
from stemma.server.turn.build import Prompt, Turn
from stemma.server.turn.chat import ChatAsked, chat_turn
from stemma.server.turn.context import ApiContext, context_of
from stemma.server.turn.hints import Hints, hint_of
from stemma.server.turn.models import answered_by, check_model
from stemma.server.turn.outputs import OutputStream, stream_header
from stemma.server.turn.prompts import chat_prompt
from stemma.types import FinishReason, RetentionRange

router = Router(anthropic_error)


@router.post("/v1/messages", TENANT, sends=(JSON_TYPE, EVENTS_TYPE), openapi_extra=takes(MessagesRequest))
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = validate(MessagesRequest, await read_object(request))
    marks = marks_of(body)
    chat = validate(ChatRequest, chat_fields(body))
    hinted = partial(_marked, context, body, chat, marks)
    turn = await chat_turn(context, request, ChatAsked(new_id("msg"), "messages", chat, hinted=hinted))
    reply = _Reply(context, turn, body)
    if body.stream:
        outputs = await context.runner.start(request, [turn])
        source = reply.events(outputs)
        return EventStream(
            source, outputs, stream_header(outputs), lambda error: _event(anthropic_error.body(error))
        )
    [result] = await context.runner.run_to_end(request, [turn])
    return json_response(reply.whole(result))


@router.post("/v1/messages/count_tokens", TENANT, openapi_extra=takes(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a conversation becomes."""
    context = context_of(request)
    body = validate(CountTokensRequest, await read_object(request))
    adapter = check_model(context.engine, body.model)
    marks_of(body)
    chat = validate(ChatRequest, chat_fields(body))
    prompt = await chat_prompt(context.intake, chat, adapter)
    return json_response({"input_tokens": len(prompt.token_ids)})


async def _marked(
    context: ApiContext,
    body: MessagesRequest,
    chat: ChatRequest,
    marks: Sequence[Mark],
    hints: Hints,
    prompt: Prompt,
) -> Hints:
    """Return the hints with those of what is marked; what the body says itself holds everywhere."""
    ends = [await _num_marked(context, body, chat, mark, prompt) for mark in marks]
    ranges = tuple(
        RetentionRange(one.num_tokens, hint_of(body.priority, body.cache_ttl_s, one.hint))
        for one in ranges_of(marks, ends)
    )
    return replace(hints, retention=replace(hints.retention, ranges=ranges))


async def _num_marked(
    context: ApiContext, body: MessagesRequest, given: ChatRequest, mark: Mark, prompt: Prompt
) -> int:
    """Return how many tokens lie before a mark: those that a prompt which ends there has in common.

    A mark on the tools or the system text counts up to the first turn.
    """
    if mark.num_turns == len(body.messages):
        return len(prompt.token_ids)
    head = body.messages[: mark.num_turns] or [InputTurn(role="user", content="")]
    try:
        marked = CountTokensRequest(messages=head, system=body.system, tools=body.tools)
        fields = chat_fields(marked)
        fields |= {"add_generation_prompt": False, "continue_final_message": False}
        fields |= {"enable_thinking": given.enable_thinking}
        fields["chat_template_kwargs"] = given.chat_template_kwargs
        fields |= {"cache_salt": given.cache_salt, "exact_history": given.exact_history}
        chat = validate(ChatRequest, {name: value for name, value in fields.items() if value is not None})
        adapter = check_model(context.engine, body.model)
        prefix = await chat_prompt(context.intake, chat, adapter, given.cache_salt or "")
    except InvalidRequest:  # a template may refuse a conversation that ends here
        return 0
    return num_shared(prompt.token_ids, prefix.token_ids)


@dataclass(slots=True)
class _End:
    """How an answer ended."""

    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    """The stop string, or the id of the token that stopped it."""

    def of(self, blocks: ContentBlocks) -> dict[str, str | None]:
        """Return Anthropic's words for it."""
        if self.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if blocks.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(self.stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}


class _Reply:
    """One message, whole or as events."""

    def __init__(self, context: ApiContext, turn: Turn, body: MessagesRequest) -> None:
        self._context = context
        self._turn = turn
        self._marked = turn.asked.hints.retention.ranges
        self._extra: dict[str, Any] = {} if body.context_management is None else _UNEDITED
        """Members that its end has beside those of all."""
        self._diagnostics = None
        if body.diagnostics is not None and (earlier := body.diagnostics.previous_message_id) is not None:
            self._diagnostics = cache_miss_reason(turn.since(context.recent, earlier))

    def whole(self, result: Collected) -> dict[str, Any]:
        """Return the message of a request that is complete."""
        [sequence] = result.sequences
        blocks, parser = self._blocks(), self._turn.reader.parser()
        blocks.feed([*parser.feed(sequence.text), *parser.end()])
        blocks.end()
        end = _End(sequence.finish_reason, sequence.stop_reason)
        if end.finish_reason is FinishReason.ABORT:
            raise GenerationFailed("the server ended this request before its answer was complete")
        usage = self._usage(result)
        return self._message(blocks, usage) | end.of(blocks) | self._extra

    async def events(self, outputs: OutputStream) -> AsyncGenerator[bytes, None]:
        """Yield the events."""
        blocks, parser, end = self._blocks(), self._turn.reader.parser(), _End()
        [answer] = outputs.answers
        has_begun = False
        async for _, output in outputs:
            told: list[dict[str, Any]] = []
            if not has_begun:  # only now it is known what was reused
                has_begun = True
                message = self._message(blocks, self._usage(answer, has_begun=False))
                told += [{"type": "message_start", "message": message}, {"type": "ping"}]
            for delta in output.deltas:
                told += blocks.feed(parser.feed(delta.text))
                if delta.finish_reason is not None:
                    end = _End(delta.finish_reason, delta.stop_reason)
                    told += blocks.feed(parser.end())
            if told:
                yield b"".join(map(_event, told))
        if end.finish_reason is FinishReason.ABORT:
            raise GenerationFailed("the server ended this request before its answer was complete")
        last = {
            "type": "message_delta",
            "delta": end.of(blocks),
            "usage": self._usage(answer),
            **self._extra,
        }
        yield b"".join(map(_event, [*blocks.end(), last, {"type": "message_stop"}]))

    def _blocks(self) -> ContentBlocks:
        return ContentBlocks(with_thinking=self._turn.reader.with_reasoning)

    def _message(self, blocks: ContentBlocks, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._turn.request.request_id,
            "type": "message",
            "role": "assistant",
            "model": answered_by(self._context.engine, self._turn.request.adapter),
            "content": list(blocks.blocks),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
            "diagnostics": self._diagnostics,
        }

    def _usage(self, answer: Collected, *, has_begun: bool = True) -> dict[str, Any]:
        """Return Anthropic's counts: read from cache, written for later, and the rest, which add up."""
        cache = answer.cache
        ours = history_detail(cache) | explanation_of(cache) | answer.notes
        read = cache.num_cached_tokens
        written = for_an_hour = start = 0
        for one in self._marked:
            new = max(0, one.num_tokens - max(read, start))
            written += new
            for_an_hour += new if (one.hint.ttl_s or 0.0) > _SHORT_TTL_S else 0
            start = one.num_tokens
        return {
            "input_tokens": cache.num_prompt_tokens - read - written,
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": written,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written - for_an_hour,
                "ephemeral_1h_input_tokens": for_an_hour,
            },
            "output_tokens": answer.num_generated_tokens if has_begun else 0,
            "service_tier": "standard",
            **(
                {"stemma": ours}
                if (ours := history_detail(cache) | explanation_of(cache) | answer.notes)
                else {}
            ),
        }


_SHORT_TTL_S = 300.0
_UNEDITED: dict[str, Any] = {"context_management": {"applied_edits": []}}
"""What a client is told that asks for edits of its context: there were none."""


def _event(body: dict[str, Any]) -> bytes:
    return event(body, body["type"])
