"""One turn of a conversation, for the planes that are variants of chat."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from starlette.requests import Request

from stemma.server.answers.chat import AnswerReader, tool_use
from stemma.server.answers.formats.forced import TextGrammar
from stemma.server.door.answer_memory import NOTHING_ELSE, told_ids
from stemma.server.schemas.openai import ChatRequest
from stemma.server.turn.build import Asked, Prompt, Turn
from stemma.server.turn.context import ApiContext
from stemma.server.turn.hints import Hints, hints_of
from stemma.server.turn.models import check_model
from stemma.server.turn.next_turn import continued, next_turn
from stemma.server.turn.prompts import chat_prompt, check_tokens
from stemma.server.turn.sampling import candidates, chat_sampling
from stemma.types import TokenArray

_REASONING_MARK_TOKENS = 16
"""Tokens at a prompt's end among which a template's ``<think>`` is looked for."""


async def _as_they_are(hints: Hints, prompt: Prompt) -> Hints:
    return hints


@dataclass(frozen=True, slots=True, eq=False)
class ChatAsked:
    """What a plane makes of its body: a chat request that means the same."""

    request_id: str
    api: str
    body: ChatRequest
    earlier: TokenArray | None = None
    """Ids of the conversation after the last answer: the prompt begins with them if its text begins with
    theirs, and no image stands in it."""
    texts: Mapping[str, TextGrammar] = field(default_factory=dict)
    """The forms of texts that tools take, which chat has no field for."""
    num_texts: int = 0
    """How often its API repeats the text of an answer."""
    hinted: Callable[[Hints, Prompt], Awaitable[Hints]] = _as_they_are
    """Returns the body's hints with those that the plane has words of its own for."""


async def chat_turn(context: ApiContext, http: Request, asked: ChatAsked) -> Turn:
    """Return the turn, made in these steps: adapter, sampling, prompt, reader, hints, next turn."""
    body, intake = asked.body, context.intake
    adapter = check_model(context.engine, body.model)
    params, beam = candidates(intake, body, chat_sampling(intake, body))
    context.runner.expect(params.n if beam is None else beam.width)
    prompt = await chat_prompt(intake, body, adapter, body.cache_salt or "")
    held = None if prompt.images is not None else asked.earlier
    if held is not None:
        prompt = await _going_on(context, held, prompt)
    reader = _answer_reader(context, asked, prompt.token_ids)
    params = reader.constrain(params, context.engine.tokenizer)
    hints = await asked.hinted(hints_of(body), prompt)
    following = next_turn(context, body, adapter, reader, None if held is None else prompt.token_ids)
    return context.turns.build(
        http,
        asked.api,
        Asked(
            request_id=asked.request_id,
            prompt=prompt,
            params=params,
            hints=hints,
            adapter=adapter,
            beam=beam,
            roles=tuple(message.role for message in body.messages),
            told=replace(
                told_ids(prompt.token_ids) if body.return_token_ids else NOTHING_ELSE,
                num_texts=asked.num_texts,
            ),
            reader=reader,
            next_turn=following,
        ),
    )


async def _going_on(context: ApiContext, earlier: TokenArray, prompt: Prompt) -> Prompt:
    tokenizer = context.engine.tokenizer
    tokens = await context.intake.in_thread(lambda: continued(tokenizer, earlier, prompt.token_ids))
    return replace(prompt, token_ids=check_tokens(context.intake, tokens, "messages"))


def _answer_reader(context: ApiContext, asked: ChatAsked, tokens: TokenArray) -> AnswerReader:
    """Return what reads the answers to what is asked, whose prompt is `tokens`."""
    body = asked.body
    known = context.answer_format
    if not body.separate_reasoning:
        known = replace(known, thinking=None)
    opened = False
    if known.thinking is not None:
        end = tokens[-_REASONING_MARK_TOKENS:].tolist()
        opened = known.thinking.is_open_at(context.engine.tokenizer.decode(end, skip_special_tokens=False))
    use = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls, texts=asked.texts)
    return AnswerReader(known, use, opened, with_reasoning=body.include_reasoning)
