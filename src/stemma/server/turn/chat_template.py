"""Chat templates: what a client may pass to the checkpoint's, and how a client's own template is handled.

A template is a program. The checkpoint's renders in bounds (`model/text/template_bounds.py`), and its input
comes from clients. So the size of the input is limited, and a client sets only variables that the template
reads, never a parameter of the function that renders it. A client's own template is refused, or rendered with
a time and a memory limit in a process (`template_process.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from stemma.errors import InvalidRequest
from stemma.model.text.tokenizer import Tokenizer
from stemma.model.vision.prompt import ReadImage
from stemma.server.door.caller import caller
from stemma.server.history.answers import scope_of
from stemma.server.history.joining import HistoryJoiner
from stemma.server.observe.ignored_hints import count_hint
from stemma.server.observe.prompt_parts import PromptParts
from stemma.server.schemas.bounds import (
    MAX_TEMPLATE_KWARGS,
    MAX_TEMPLATE_NUMBER,
    MAX_TEMPLATE_VALUE_CHARS,
)
from stemma.server.schemas.openai import ChatRequest
from stemma.server.turn.build import Prompt
from stemma.server.turn.intake import Intake
from stemma.server.turn.template_process import TemplateFields
from stemma.server.turn.thinking import EFFORT_TOKENS, VARIABLES, thinking_of

_MAX_SHOWN_CHARS = 64
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def num_chars(value: Any) -> int:
    """Return the length of all strings in a JSON value, keys included. Doesn't recurse."""
    total, pending = 0, [value]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, Mapping):
            pending.extend(one.keys())
            pending.extend(one.values())
        elif isinstance(one, list):
            pending.extend(one)
    return total


def template_arguments(tokenizer: Tokenizer, body: ChatRequest) -> dict[str, Any]:
    """Return what the template gets besides messages and tools. Raises InvalidRequest naming the argument.

    Variables that this template doesn't read are ignored: clients send ``enable_thinking`` to every model.
    """
    known = tokenizer.template_variables
    arguments: dict[str, Any] = {}
    for name, value in (body.chat_template_kwargs or {}).items():
        where = f"chat_template_kwargs.{name[:_MAX_SHOWN_CHARS]}"
        if name in _RESERVED or name.startswith("_") or name.endswith("_token"):
            raise InvalidRequest(f"{where} is not for requests to set", param="chat_template_kwargs")
        if not _is_plain(value):
            raise InvalidRequest(f"{where} must be short plain values", param="chat_template_kwargs")
        if name in known:
            arguments[name] = value
    wish = thinking_of(body)
    if wish.wanted is not None:
        arguments = {name: wish.wanted for name in VARIABLES if name in known} | arguments
    if wish.effort is not None and "reasoning_effort" in known:
        arguments.setdefault("reasoning_effort", wish.effort)
    elif wish.effort is not None and wish.max_tokens is None and wish.effort not in EFFORT_TOKENS:
        count_hint("reasoning_effort")
    return arguments


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= MAX_TEMPLATE_KWARGS and all(_is_scalar(item) for item in value)
    return _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEMPLATE_VALUE_CHARS
    if isinstance(value, int | float):
        return abs(value) <= MAX_TEMPLATE_NUMBER
    return value is None


async def conversation_prompt(
    intake: Intake,
    body: ChatRequest,
    conversation: TemplateFields,
    salt: str | None,
    adapter: str,
    images: Sequence[ReadImage],
) -> Prompt:
    """Return `conversation` with its images, tokenized. Raises InvalidRequest if the template fails.

    `salt`: as `Intake.tokenized` has it. `adapter`: key of the adapter that answers, which is part of where
    answers are looked for.
    """
    tokenizer, joiner = intake.engine.tokenizer, _joiner(intake, body)
    scope = scope_of(caller().tenant, body.cache_salt or "", adapter)

    def prompt_of(text: str) -> Prompt:
        parts = PromptParts.of(conversation.messages, conversation.tools, conversation.arguments)
        encode = partial(intake.tokenize, add_special_tokens=False, salt=salt)
        if images:
            assert intake.images is not None
            text = intake.images.reader.expand(text, images)
        tokens, history = (encode(text), None) if joiner is None else joiner.prompt(scope, text, encode)
        if not images:
            return Prompt(tokens, history, parts=parts)
        assert intake.images is not None
        placed, found = intake.images.reader.place(tokens, images)
        return Prompt(placed, history, found, parts)

    if body.chat_template is not None:
        foreign = await intake.render_foreign(body.chat_template, conversation)
        return await intake.tokenize_in_thread(lambda: prompt_of(foreign))
    arguments = dict(conversation.arguments)
    if conversation.continue_final_message:
        arguments["continue_final_message"] = True

    def render_and_tokenize() -> Prompt:
        text = tokenizer.render_chat(
            conversation.messages,
            tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt,
            template_kwargs=arguments,
        )
        return prompt_of(text)

    return await intake.tokenize_in_thread(render_and_tokenize)


def _joiner(intake: Intake, body: ChatRequest) -> HistoryJoiner | None:
    """Return what makes the prompt of `body`; None if it wants its text tokenized as it stands.

    A salt of its own says that a prompt shall have nothing to do with others, so it has to ask.
    """
    wanted = not body.cache_salt if body.exact_history is None else body.exact_history
    return intake.history if wanted else None
