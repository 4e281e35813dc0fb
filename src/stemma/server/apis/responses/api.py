"""``/v1/responses``: OpenAI's Responses API over the chat engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.api import RequestOutput
from stemma.errors import GenerationFailed, InvalidRequest, NotFound, StemmaError
from stemma.server.answers.cache_diagnostics import prompt_cache_diagnostics
from stemma.server.answers.events import AnswerParser
from stemma.server.answers.usage import UsageMeter
from stemma.server.apis.pages import item_page
from stemma.server.apis.responses.conversations import add_turn, conversation_of
from stemma.server.apis.responses.items import (
    ChatMessage,
    chat_fields,
    chat_messages,
    text_grammars,
    tools_of,
)
from stemma.server.apis.responses.listing import whole_items
from stemma.server.apis.responses.output import OutputItems, StreamEvent, new_id
from stemma.server.apis.responses.store import Item, StoredResponse, Stores, stores_of
from stemma.server.apis.responses.tools import chosen
from stemma.server.door.access import JSON_TYPE, owner_of
from stemma.server.door.answer_memory import PARSED_BYTES
from stemma.server.door.entry import hold
from stemma.server.errors import json_response, openai_error
from stemma.server.observe.collected import Collected
from stemma.server.observe.ignored_hints import count_hint
from stemma.server.openapi import takes
from stemma.server.routes import EVENTS_TYPE, TENANT, Router
from stemma.server.schemas.openai import ChatRequest
from stemma.server.schemas.responses import ConversationName, InputTokensRequest, ResponsesRequest
from stemma.server.transport.sse import EventStream, event
from stemma.server.turn.body import read_object, validate
from stemma.server.turn.build import Prompt, Turn
from stemma.server.turn.chat import ChatAsked, chat_turn
from stemma.server.turn.context import ApiContext, context_of
from stemma.server.turn.hints import Hints, hint_of
from stemma.server.turn.models import answered_by, check_model
from stemma.server.turn.outputs import OutputStream, stream_header
from stemma.server.turn.prompts import chat_prompt
from stemma.types import DEFAULT_PRIORITY, FinishReason, RetentionHint, TokenArray, as_tokens

router = Router(openai_error)

KNOWN_INCLUDES = frozenset({"message.output_text.logprobs", "reasoning.encrypted_content"})
"""Values of `include` that a model without tools of its own could give; here it has no effect."""
STORED_PRIORITY = DEFAULT_PRIORITY + 10
"""Priority of the blocks of stored conversations, which are likely to be continued."""
_NUM_TEXTS = 5
"""Times that an answer's text is there beside the first: in its items, stored, for the next turn."""


@router.post("/v1/responses", TENANT, sends=(JSON_TYPE, EVENTS_TYPE), openapi_extra=takes(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answer ``input``, after the conversation of ``previous_response_id`` if that is given."""
    context, stores = context_of(request), stores_of(request)
    body = validate(ResponsesRequest, await read_object(request))
    check_model(context.engine, body.model)
    for name in body.include or ():
        count_hint(f"include.{name}" if name in KNOWN_INCLUDES else "include")
    owner = owner_of(request)
    past = _past(request, body)
    history = [*past.messages, *chat_messages(body.input)]
    chat = validate(ChatRequest, chat_fields(body, _with_instructions(body, history)))
    response_id = new_id("resp")
    asked = ChatAsked(
        response_id,
        "responses",
        chat,
        past.token_ids,
        texts=text_grammars(body),
        num_texts=_NUM_TEXTS,
        hinted=partial(_retained, stores, body),
    )
    turn = await chat_turn(context, request, asked)
    reply = _Reply(context, stores, body, turn, owner, history, past.items, whole_items(body.input))
    if body.stream:
        outputs = await context.runner.start(request, [turn])
        return EventStream(reply.events(outputs), outputs, stream_header(outputs))
    [result] = await context.runner.run_to_end(request, [turn])
    return json_response(await reply.whole(result))


@router.post("/v1/responses/input_tokens", TENANT, openapi_extra=takes(InputTokensRequest))
async def count_input(request: Request) -> Response:
    """Count the tokens of the prompt that ``input`` becomes, after the conversation that it goes on from."""
    context = context_of(request)
    body = validate(InputTokensRequest, await read_object(request))
    adapter = check_model(context.engine, body.model)
    past = _past(request, body)
    history = [*past.messages, *chat_messages(body.input)]
    chat = validate(ChatRequest, chat_fields(body, _with_instructions(body, history)))
    prompt = await chat_prompt(context.intake, chat, adapter, body.cache_salt or "")
    found = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
    return json_response(found)


@router.get("/v1/responses/{response_id}/input_items", TENANT, metered=True)
async def list_input_items(request: Request, response_id: str) -> Response:
    """List what a stored response was given to, the newest first unless ``order=asc``."""
    found = _stored(request, response_id)
    hold(request, "response_id", PARSED_BYTES * len(found.input_items))
    return json_response(item_page(orjson.loads(found.input_items), request))


@router.get("/v1/responses/{response_id}", TENANT, metered=True)
async def get_response(request: Request, response_id: str) -> Response:
    """Return a stored response."""
    return Response(_stored(request, response_id).response, media_type="application/json")


@router.delete("/v1/responses/{response_id}", TENANT)
async def delete_response(request: Request, response_id: str) -> Response:
    """Drop a stored response. Later responses that continue it are kept."""
    if not stores_of(request).responses.delete(owner_of(request), response_id):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _stored(request: Request, response_id: str) -> StoredResponse:
    found = stores_of(request).responses.get(owner_of(request), response_id)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"there is no response {response_id[:64]!r}: it was not stored, or its time is over")


@dataclass(frozen=True, slots=True)
class _Past:
    """The turns that a response goes on from."""

    messages: list[ChatMessage] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    token_ids: TokenArray | None = None
    """As the engine holds it."""


def _past(request: Request, body: ResponsesRequest) -> _Past:
    """Return the conversation, or that of the response, to go on from, within the memory of answers."""
    stores, owner = stores_of(request), owner_of(request)
    if (name := _conversation_id(body)) is not None:
        if body.previous_response_id is not None:
            message = "give previous_response_id or conversation, not both"
            raise InvalidRequest(message, param="previous_response_id")
        conversation = conversation_of(stores, owner, name)
        hold(request, "conversation", PARSED_BYTES * len(conversation.item_list))
        items = conversation.items()
        return _Past(chat_messages(items), items, conversation.token_ids if items else None)
    if body.previous_response_id is None:
        return _Past()
    found = stores.responses.get(owner, body.previous_response_id)
    if found is None:
        message = str(_not_found(body.previous_response_id))
        raise InvalidRequest(message, param="previous_response_id")
    num_bytes = len(found.messages) + len(found.input_items) + len(found.response)
    hold(request, "previous_response_id", PARSED_BYTES * num_bytes)
    return _Past(found.history(), found.items(), found.token_ids)


def _conversation_id(body: ResponsesRequest) -> str | None:
    return body.conversation.id if isinstance(body.conversation, ConversationName) else body.conversation


def _with_instructions(body: ResponsesRequest, history: list[ChatMessage]) -> list[ChatMessage]:
    if body.instructions is None:
        return history
    return [{"role": "system", "content": body.instructions}, *history]


def _is_stored(stores: Stores, body: ResponsesRequest) -> bool:
    return body.store is not False and stores.responses.capacity > 0


async def _retained(stores: Stores, body: ResponsesRequest, hints: Hints, prompt: Prompt) -> Hints:
    """Return the hints with that of a stored conversation's blocks, unless it brings its own."""
    if not _is_stored(stores, body) or hints.retention.rest.ttl_s is not None:
        return hints
    default = RetentionHint(STORED_PRIORITY, stores.responses.ttl_s)
    rest = hint_of(body.priority, body.cache_ttl_s, default)
    return replace(hints, retention=replace(hints.retention, rest=rest))


@dataclass(slots=True)
class _Progress:
    """How far an answer is."""

    parser: AnswerParser
    items: OutputItems
    answer: Collected
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def was_cut(self) -> bool:
        """Whether the answer ended at its limit."""
        return self.finish_reason is FinishReason.LENGTH


class _Reply:
    """One response, whole or as events."""

    def __init__(
        self,
        context: ApiContext,
        stores: Stores,
        body: ResponsesRequest,
        turn: Turn,
        owner: str,
        history: list[ChatMessage],
        past_items: list[Item],
        given_items: list[Item],
    ) -> None:
        self._context = context
        self._stores = stores
        self._body = body
        self._turn = turn
        self._owner = owner
        self._history = history
        self._past_items = past_items
        self._given_items = given_items
        self._created_at = int(time.time())

    async def whole(self, result: Collected) -> dict[str, Any]:
        """Return the response of a request that is complete."""
        [sequence] = result.sequences
        progress = self._progress(result)
        progress.token_ids = sequence.token_ids
        progress.finish_reason = sequence.finish_reason
        progress.items.feed([*progress.parser.feed(sequence.text), *progress.parser.end()])
        progress.items.end("incomplete" if progress.was_cut else "completed")
        return await self._finished(progress)

    async def events(self, outputs: OutputStream) -> AsyncGenerator[bytes, None]:
        """Yield the events; the last one carries the whole response."""
        progress = self._progress(outputs.answers[0])
        numbered = _Numbered()
        begun = self._response("in_progress", progress)
        yield numbered.write([{"type": f"response.{name}", "response": begun} for name in _BEGIN])
        try:
            async for _, output in outputs:
                if told := self._take(progress, output):
                    yield numbered.write(told)
            told = progress.items.end("incomplete" if progress.was_cut else "completed")
            response = await self._finished(progress)
        except StemmaError as error:
            detail = openai_error.body(error)["error"]
            failed = self._response("failed", progress)
            failed["error"] = {"code": "server_error", "message": detail["message"]}
            yield numbered.write([{"type": "response.failed", "response": failed}])
            return
        yield numbered.write([*told, {"type": f"response.{response['status']}", "response": response}])

    def _progress(self, answer: Collected) -> _Progress:
        reader = self._turn.reader
        offered = tools_of(self._body)
        _, forced = chosen(self._body.tool_choice, offered)
        return _Progress(reader.parser(), OutputItems(reader.format.tools, offered, forced), answer)

    def _take(self, progress: _Progress, output: RequestOutput) -> list[StreamEvent]:
        """Note an output; return what to tell of it."""
        told: list[StreamEvent] = []
        for delta in output.deltas:
            progress.token_ids.extend(delta.token_ids)
            told += progress.items.feed(progress.parser.feed(delta.text))
            if delta.finish_reason is not None:
                progress.finish_reason = delta.finish_reason
                told += progress.items.feed(progress.parser.end())
        return told

    async def _finished(self, progress: _Progress) -> dict[str, Any]:
        """Return the final response, and keep it if the client wants that."""
        if progress.finish_reason is FinishReason.ABORT:
            raise GenerationFailed("the server ended this request before its answer was complete")
        response = self._response("incomplete" if progress.was_cut else "completed", progress)
        if progress.was_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = await self._usage(progress)
        response["prompt_cache_diagnostics"] = self._diagnostics(progress.answer)
        held = np.concatenate((self._turn.request.prompt_token_ids, as_tokens(progress.token_ids)))
        self._add_to_conversation(progress, response, held)
        if _is_stored(self._stores, self._body):
            given = orjson.dumps([*self._past_items, *self._given_items])
            messages = [*self._history, *chat_messages(progress.items.items)]
            entry = StoredResponse(orjson.dumps(response), orjson.dumps(messages), held, given)
            self._stores.responses.put(self._owner, response["id"], entry)
        return response

    def _add_to_conversation(self, progress: _Progress, response: dict[str, Any], held: TokenArray) -> None:
        """Add the turn to the conversation that it went on from, if it goes on from one.

        Where it can't be added, since it was deleted meanwhile or holds too much, the answer is given all the
        same and says so: its `conversation` is null.
        """
        if (name := _conversation_id(self._body)) is None:
            return
        turn = [*self._given_items, *progress.items.items]
        try:
            add_turn(self._stores, self._owner, name, turn, held)
        except InvalidRequest:
            response["conversation"] = None

    def _diagnostics(self, answer: Collected) -> dict[str, Any] | None:
        """Return what changed since the response that the body names."""
        options = self._body.prompt_cache_options
        if options is None or options.comparison_response_id is None:
            return None
        found = self._turn.since(self._context.recent, options.comparison_response_id)
        return prompt_cache_diagnostics(found, answer.cache)

    async def _usage(self, progress: _Progress) -> dict[str, Any]:
        usage = UsageMeter.of([progress.answer]).usage()
        reasoning, tokenizer = progress.items.reasoning, self._context.engine.tokenizer
        num_reasoning = 0
        if reasoning:
            ids = await self._context.intake.in_thread(
                lambda: tokenizer.encode(reasoning, add_special_tokens=False)
            )
            num_reasoning = len(ids)
        num_cached = usage["prompt_cache_hit_tokens"]
        written = usage["prompt_cache_miss_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": written},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(num_reasoning, usage["completion_tokens"])},
            "total_tokens": usage["total_tokens"],
            "stemma": usage["stemma"],
        }

    def _response(self, status: str, progress: _Progress) -> dict[str, Any]:
        """Return the response as it stands."""
        body, params = self._body, self._turn.request.params
        effort = body.reasoning.effort if body.reasoning is not None else None
        wanted = body.text.format if body.text is not None else None
        conversation = _conversation_id(body)
        return {
            "id": self._turn.request.request_id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": answered_by(self._context.engine, self._turn.request.adapter),
            "output": progress.items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": _is_stored(self._stores, body),
            "temperature": params.temperature,
            "text": {"format": wanted or {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "conversation": None if conversation is None else {"id": conversation},
            "usage": None,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_retention": body.prompt_cache_retention,
            "prompt_cache_options": _cache_options(body),
            "prompt_cache_diagnostics": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }


def _cache_options(body: ResponsesRequest) -> dict[str, Any] | None:
    options = body.prompt_cache_options
    if options is None:
        return None
    told = {"mode": "implicit", "ttl": options.ttl or "30m"}
    return told | {"comparison_response_id": options.comparison_response_id}


_BEGIN = ("created", "in_progress")


class _Numbered:
    """Writes events, with their names and numbers."""

    def __init__(self) -> None:
        self._number = 0

    def write(self, told: list[StreamEvent]) -> bytes:
        """Return the events as bytes."""
        written = []
        for each in told:
            written.append(event({**each, "sequence_number": self._number}, each["type"]))
            self._number += 1
        return b"".join(written)
