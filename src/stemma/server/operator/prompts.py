"""The prompts that an operator names: their tokens, and computing them ahead."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from stemma.engine.api import CacheReport, GenerationRequest
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import InvalidRequest
from stemma.model.lora.adapter import Adapter
from stemma.prefix.keys import Namespace
from stemma.server.operator.context import OperatorContext
from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import Messages, Name
from stemma.server.schemas.openai import ChatRequest
from stemma.server.turn.body import validate
from stemma.server.turn.prompts import chat_prompt, completion_prompts
from stemma.server.turn.run import new_request_id
from stemma.types import NO_RETENTION, Retention, TokenArray


class PromptRequest(RequestModel):
    """A prompt, by its text, token ids or messages."""

    prompt: str | list[Any] | None = None
    """Text or token ids."""
    messages: Messages | None = None
    model: Name | None = None
    """An adapter, whose blocks are its own; default: the model without one."""

    @model_validator(mode="after")
    def _one_of(self) -> PromptRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


async def prompt_tokens(
    context: OperatorContext, body: PromptRequest, *, is_open: bool = False
) -> TokenArray:
    """Return the tokens of one prompt, or of messages; `is_open`: without what begins the answer."""
    if body.messages is not None:
        chat = {
            "model": context.engine.model_name,
            "messages": body.messages,
            "add_generation_prompt": not is_open,
            "exact_history": False,  # the same ids at any time, on any server
        }
        prompt = await chat_prompt(context.intake, validate(ChatRequest, chat))
        if prompt.images is not None:
            raise InvalidRequest("prompts of the operator hold no images", param="messages")
        return prompt.token_ids
    assert body.prompt is not None
    prompts = await completion_prompts(context.intake, body.prompt)
    if len(prompts) > 1:
        raise InvalidRequest("give one prompt", param="prompt")
    return prompts[0]


async def prewarm_prompt(
    context: OperatorContext,
    tokens: TokenArray,
    namespace: Namespace,
    adapter: Adapter | None,
    retention: Retention = NO_RETENTION,
) -> CacheReport:
    """Compute a prompt ahead of its first use; return what of it was cached before."""
    wanted = GenerationRequest(
        request_id=new_request_id("prewarm"),
        prompt_token_ids=tokens,
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        namespace=namespace,
        adapter=adapter,
        retention=retention,
    )
    cache = CacheReport(len(tokens))
    async for output in context.engine.generate(wanted):
        output.raise_error()
        cache = output.cache
    return cache
