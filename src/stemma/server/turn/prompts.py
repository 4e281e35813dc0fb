"""From an API's prompt to checked token ids; text is tokenized off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from stemma.config.server_settings import RequestSettings
from stemma.errors import InvalidRequest, PromptTooLong
from stemma.model.lora.adapter import Adapter
from stemma.model.text.tokenizer import Tokenizer
from stemma.model.vision.sources import ImageSource
from stemma.server.schemas.bounds import MAX_INT32, MAX_PROMPTS
from stemma.server.schemas.openai import ChatRequest, Message, OpenAIRequest
from stemma.server.turn.build import Prompt
from stemma.server.turn.chat_template import (
    conversation_prompt,
    num_chars,
    template_arguments,
)
from stemma.server.turn.client_nonces import without_nonces
from stemma.server.turn.intake import MAX_CHARS_PER_TOKEN, Intake
from stemma.server.turn.template_messages import template_messages
from stemma.server.turn.template_process import TemplateFields
from stemma.server.turn.template_rules import TemplateRules
from stemma.types import TokenArray, as_tokens

Tokens = TypeVar("Tokens", TokenArray, list[int])


@dataclass(frozen=True, slots=True)
class PromptCut:
    """How a request wants its prompt cut: the number of tokens to keep, and on which side."""

    num_tokens: int
    keep_first: bool

    def of(self, tokens: Tokens) -> Tokens:
        """Return the first or the last tokens."""
        return tokens[: self.num_tokens] if self.keep_first else tokens[-self.num_tokens :]


def last_tokens(num_tokens: int | None) -> PromptCut | None:
    """Return the cut that leaves the last `num_tokens`, or none."""
    return None if num_tokens is None else PromptCut(num_tokens, keep_first=False)


def wanted_cut(body: OpenAIRequest) -> PromptCut | None:
    """Return what `truncate_prompt_tokens` and `truncation_side` ask for."""
    if body.truncate_prompt_tokens is None:
        return None
    return PromptCut(body.truncate_prompt_tokens, keep_first=body.truncation_side == "right")


def check_tokens(
    intake: Intake, tokens: Tokens, param: str = "prompt", cut: PromptCut | None = None
) -> Tokens:
    """Return `tokens`, as far as `cut` leaves them.

    Raises InvalidRequest if there are none, or more than the context can hold.
    """
    if len(tokens) == 0:
        raise InvalidRequest("the prompt is empty", param=param)
    if cut is not None:
        tokens = cut.of(tokens)
    tokens = _fitted(intake.settings.requests, tokens, param)
    limit = intake.engine.max_model_len
    if len(tokens) >= limit:
        raise PromptTooLong.of(f"{len(tokens)} tokens", limit, param=param)
    return tokens


def _fitted(limits: RequestSettings, tokens: Tokens, param: str) -> Tokens:
    """Return `tokens`, truncated to the limit if the settings say so; else raise PromptTooLong."""
    most = limits.max_input_tokens
    if most is None or len(tokens) <= most:
        return tokens
    if limits.truncation == "left":
        return tokens[-most:]
    if limits.truncation == "right":
        return tokens[:most]
    raise PromptTooLong.of(f"{len(tokens)} tokens", most, param=param, counts="without output")


def check_length(intake: Intake, num_chars: int, param: str) -> None:
    """Raise PromptTooLong for texts so long that tokenizing them would only waste time."""
    if num_chars > MAX_CHARS_PER_TOKEN * intake.engine.max_model_len:
        raise PromptTooLong.of(f"{num_chars} characters", intake.engine.max_model_len, param=param)


async def completion_prompts(
    intake: Intake,
    prompt: str | list[Any],
    *,
    add_special_tokens: bool = True,
    cut: PromptCut | None = None,
    salt: str | None = None,
    param: str = "prompt",
) -> list[TokenArray]:
    """Return the token ids of each prompt in OpenAI's ``prompt``: text, texts, ids, or lists of ids.

    `salt`: as `Intake.tokenized` has it. `param`: what the body calls them.
    """
    options: dict[str, Any] = {"add_special_tokens": add_special_tokens, "cut": cut, "salt": salt}
    options["param"] = param
    if isinstance(prompt, str):
        return [await text_prompt(intake, prompt, **options)]
    if not prompt:
        raise InvalidRequest("the prompt is empty", param=param)
    if _all_of(prompt, int):
        return [_token_prompt(intake, prompt, cut, param)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"more than {MAX_PROMPTS} prompts in one request", param=param)
    if _all_of(prompt, str):
        found = []
        for text in prompt:
            found.append(await text_prompt(intake, text, **options))
            await asyncio.sleep(0)  # short texts are tokenized at once: between two, others have their turn
        return found
    if _all_of(prompt, list) and all(_all_of(ids, int) for ids in prompt):
        return [_token_prompt(intake, ids, cut, param) for ids in prompt]
    raise InvalidRequest(
        f"{param} must be a string, a list of strings, a list of token ids, or a list of such lists",
        param=param,
    )


def num_prompts(prompt: str | list[Any]) -> int:
    """Return how many prompts OpenAI's ``prompt`` holds."""
    is_one = isinstance(prompt, str) or not prompt or _all_of(prompt, int)
    return 1 if is_one else min(len(prompt), MAX_PROMPTS)


def _all_of(items: Sequence[Any], kind: type) -> bool:
    return all(type(item) is kind for item in items)


def _token_prompt(intake: Intake, ids: list[int], cut: PromptCut | None, param: str) -> TokenArray:
    """Return the array; the engine checks the ids against the vocabulary, once they fit into int32."""
    ids = check_tokens(intake, ids, param, cut)
    if min(ids) < 0 or max(ids) > MAX_INT32:
        raise InvalidRequest(
            f"{param}: token ids are numbers from 0 to the size of the vocabulary", param=param
        )
    return as_tokens(ids)


async def text_prompt(
    intake: Intake,
    text: str,
    *,
    add_special_tokens: bool = True,
    param: str = "prompt",
    cut: PromptCut | None = None,
    salt: str | None = None,
) -> TokenArray:
    """Return the token ids of one text, as far as `cut` leaves them.

    `salt`: as `Intake.tokenized` has it.
    """
    if not text:
        raise InvalidRequest("the prompt is empty", param=param)
    check_length(intake, len(text), param)
    tokens = await intake.tokenized(text, add_special_tokens=add_special_tokens, salt=salt)
    return check_tokens(intake, tokens, param, cut)


def _with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with a schema of no arguments, where it has none: templates read it."""
    function = tool.get("function")
    if not isinstance(function, dict) or function.get("parameters") is not None:
        return tool
    return {**tool, "function": {**function, "parameters": {"type": "object", "properties": {}}}}


def conversation_of(
    tokenizer: Tokenizer, rules: TemplateRules, body: ChatRequest, given: Sequence[Message], *, sees: bool
) -> tuple[TemplateFields, list[ImageSource]]:
    """Return what the checkpoint's template renders for a chat request with these messages, and its images.

    `sees`: whether the model takes images. Raises InvalidRequest.
    """
    messages, sources = template_messages(given, sees=sees, rules=rules)
    tools = None if body.tool_choice == "none" else list(map(_with_parameters, body.tools or ())) or None
    conversation = TemplateFields(
        messages,
        tools,
        template_arguments(tokenizer, body),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
    )
    return conversation, sources


async def chat_prompt(
    intake: Intake, body: ChatRequest, adapter: Adapter | None = None, salt: str | None = None
) -> Prompt:
    """Return a conversation as the checkpoint's template renders it, to be answered with `adapter`.

    `salt`: as `Intake.tokenized` has it.
    """
    rules = intake.template_rules if body.chat_template is None else TemplateRules()
    given = without_nonces(body.messages) if intake.settings.server.strip_client_nonces else body.messages
    sees = intake.images is not None
    conversation, sources = conversation_of(intake.engine.tokenizer, rules, body, given, sees=sees)
    check_length(intake, num_chars([conversation.messages, conversation.tools]), "messages")
    key = "" if adapter is None else adapter.key
    images = [] if intake.images is None else await intake.images.read(sources)
    prompt = await conversation_prompt(intake, body, conversation, salt, key, images)
    fitting = check_tokens(intake, prompt.token_ids, "messages", wanted_cut(body))
    if prompt.images is not None and len(fitting) < len(prompt.token_ids):
        message = "a prompt with images isn't cut; leave out truncate_prompt_tokens, or shorten the messages"
        raise InvalidRequest(message, param="messages")
    return replace(prompt, token_ids=fitting)
