"""One turn of a conversation, for the APIs that are variants of chat."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stemma.engine.api import GenerationRequest
from stemma.model.lora.adapter import Adapter
from stemma.server.answers.chat import AnswerReader, tool_use
from stemma.server.apis.context import ApiContext
from stemma.server.apis.next_turn import continued, next_turn
from stemma.server.history.following import RenderedRequest
from stemma.server.requests.beam import candidates
from stemma.server.requests.prompts import chat_prompt, check_tokens
from stemma.server.requests.retention import generation_request
from stemma.server.requests.sampling import chat_sampling
from stemma.server.schemas.openai import ChatRequest
from stemma.types import TokenArray

_REASONING_MARK_TOKENS = 16
"""Tokens at a prompt's end among which a template's ``<think>`` is looked for."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A request for the engine, and the reader of its answer."""

    body: ChatRequest
    generation: GenerationRequest
    reader: AnswerReader


async def chat_turn(
    context: ApiContext,
    request_id: str,
    body: ChatRequest,
    adapter: Adapter | None,
    earlier: TokenArray | None = None,
) -> ChatTurn:
    """Return the turn that `body` asks for.

    `earlier` are the ids of the conversation after the last answer: the prompt begins with them if its text
    begins with theirs, and no image stands in it.
    """
    params, beam = candidates(context.intake, body, chat_sampling(context.intake, body))
    prompt = await chat_prompt(context.intake, body, adapter, body.cache_salt or "")
    tokens = prompt.token_ids
    if earlier is not None and prompt.images is None:
        tokenizer, known = context.engine.tokenizer, earlier
        tokens = await context.intake.in_thread(lambda: continued(tokenizer, known, tokens))
        tokens = check_tokens(context.intake, tokens, "messages")
    reader = _answer_reader(context, body, tokens)
    params = reader.constrain(params, context.engine.tokenizer)
    generation = generation_request(request_id, tokens, params, body, adapter, beam)
    generation = replace(
        generation, images=prompt.images, roles=tuple(message.role for message in body.messages)
    )
    held = None if earlier is None or prompt.images is not None else tokens
    following = next_turn(context, body, adapter, reader, held)
    tools_of = (lambda text: tuple(call.name for call in reader.read(text).calls)) if body.tools else None
    rendered = RenderedRequest.of(generation, prompt.history, following, tools_of)
    return ChatTurn(body, rendered, reader)


def _answer_reader(context: ApiContext, body: ChatRequest, tokens: TokenArray) -> AnswerReader:
    """Return what reads the answers to `body`, whose prompt is `tokens`."""
    known = context.answer_format
    if not body.separate_reasoning:
        known = replace(known, thinking=None)
    opened = False
    if known.thinking is not None:
        end = tokens[-_REASONING_MARK_TOKENS:].tolist()
        opened = known.thinking.is_open_at(context.engine.tokenizer.decode(end, skip_special_tokens=False))
    use = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    return AnswerReader(known, use, opened, with_reasoning=body.include_reasoning)
