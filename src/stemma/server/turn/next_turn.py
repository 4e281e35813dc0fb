"""The turn after an answer, rendered before it comes; prompts that go on from the ids of the turn before."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

import numpy as np

from stemma.model.lora.adapter import Adapter
from stemma.model.text.tokenizer import Tokenizer
from stemma.server.answers.chat import AnswerReader, message_of
from stemma.server.history.token_texts import HeadTexts
from stemma.server.schemas.openai import ChatRequest, Message
from stemma.server.turn.build import Prompt
from stemma.server.turn.context import ApiContext
from stemma.server.turn.prompts import chat_prompt
from stemma.types import TokenArray, as_tokens

_NEW_TEXTS = ("Why?", "42")
"""Stand for what isn't known yet: they begin with different tokens, and with no space."""


@dataclass(frozen=True, slots=True)
class FollowingTurn:
    """The turn after the answer to `body`. A `NextTurn`."""

    api: ApiContext
    body: ChatRequest
    adapter: Adapter | None
    reader: AnswerReader
    held: TokenArray | None
    """Ids of the prompt, where the next one goes on from them; None: its text alone decides."""
    context: Context

    async def prompts(self, text: str, token_ids: Sequence[int]) -> tuple[Prompt, Prompt]:
        """Return the prompts of two turns that differ in their new text alone. Raises StemmaError."""
        answer = message_of(self.reader.read(text), self.reader.format.tools)
        one, other = [await self._prompt(answer, new, token_ids) for new in _NEW_TEXTS]
        return one, other

    async def _prompt(self, answer: dict[str, Any], new: str, token_ids: Sequence[int]) -> Prompt:
        told = [Message.model_validate(one) for one in (answer, *_new_messages(answer, new))]
        body = self.body.model_copy(update={"messages": [*self.body.messages, *told]})
        prompt = await chat_prompt(self.api.intake, body, self.adapter, body.cache_salt or "")
        if self.held is None:
            return prompt
        tokenizer, tokens = self.api.engine.tokenizer, prompt.token_ids
        known = np.concatenate((self.held, as_tokens(token_ids)))
        going_on = await self.api.intake.in_thread(lambda: continued(tokenizer, known, tokens))
        return Prompt(going_on, prompt.history, prompt.images)


def next_turn(
    api: ApiContext,
    body: ChatRequest,
    adapter: Adapter | None,
    reader: AnswerReader,
    held: TokenArray | None,
) -> FollowingTurn | None:
    """Return what knows the turn after the answer to `body`, whose prompt is `held` if that is kept.

    None where it can't be rendered ahead: the answer goes on from a message, a prompt is cut, or the template
    is the client's.
    """
    is_open = body.continue_final_message or not body.add_generation_prompt
    if is_open or body.truncate_prompt_tokens is not None or body.chat_template is not None:
        return None
    return FollowingTurn(api, body, adapter, reader, held, copy_context())


def _new_messages(answer: dict[str, Any], new: str) -> list[dict[str, Any]]:
    """Return what follows an answer: the results of its calls, or what the user says."""
    calls = answer.get("tool_calls")
    if not calls:
        return [{"role": "user", "content": new}]
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": new}
        for call in calls
    ]


def continued(tokenizer: Tokenizer, earlier: TokenArray, tokens: TokenArray) -> TokenArray:
    """Return ids of the text of `tokens` that begin with as much of `earlier` as that text does.

    A model doesn't always write the ids that a tokenizer makes of its text. The blocks of an answer are
    cached under the ids that it wrote, so the next turn finds them only by these.
    """
    if len(earlier) <= len(tokens) and np.array_equal(tokens[: len(earlier)], earlier):
        return tokens
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    heads = HeadTexts(tokenizer, earlier, as_tokens(()))
    num_kept = heads.num_within(text)
    rest = tokenizer.encode(text[len(heads.head(num_kept)) :], add_special_tokens=False)
    joined = np.concatenate((earlier[:num_kept], rest))
    same = tokenizer.decode(joined.tolist(), skip_special_tokens=False) == text
    return joined if same else tokens
