"""Prompts as the model's template and tokenizer make them, and as they would be with a part undone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stemma.errors import InvalidRequest, ModelError, TraceError
from stemma.model.text.tokenizer import Tokenizer
from stemma.prefix.image_ids import MIN_IMAGE_TOKENS, image_ids
from stemma.server.schemas.openai import ChatRequest, Message
from stemma.server.turn.client_nonces import without_nonces
from stemma.server.turn.prompts import conversation_of
from stemma.server.turn.template_rules import TemplateRules
from stemma.types import TokenArray, as_tokens
from stemma_lab.lint.bodies import Body, BodyPlace

IMAGE_MARK = re.compile("\ufffc[0-9a-f]{32}\ufffc")
"""What stands in a text for an image: object replacement characters around its digest."""

_OPENS = "add_generation_prompt"


@dataclass(frozen=True, slots=True, eq=False)
class RenderedParts:
    """What a prompt is rendered from."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    settings: Mapping[str, Any] | None = None
    """What a template gets besides; None: no template renders it, the one message is the prompt's text."""
    template: str | None = None
    """The request's own; None: the model's."""


@dataclass(frozen=True, slots=True, eq=False)
class LintedPrompt:
    """One prompt."""

    place: BodyPlace
    model: str
    parts: RenderedParts
    tokens: TokenArray


class Renderer:
    """Makes prompts with one tokenizer and template, as a server of that model would."""

    def __init__(self, tokenizer: Tokenizer, num_image_tokens: int) -> None:
        self.tokenizer = tokenizer
        self._rules = TemplateRules.of(tokenizer, sees=False)
        self._num_image_tokens = max(num_image_tokens, MIN_IMAGE_TOKENS)
        self.frame = self._frame()
        """Characters that the template writes between a message and its answer."""

    def prompt(self, body: Body) -> LintedPrompt:
        """Return a body's prompt. Raises TraceError, with its line, for one that the template refuses."""
        try:
            parts = self._parts(body)
            tokens = as_tokens(body.token_ids) if body.token_ids is not None else self.tokens(parts)
        except (InvalidRequest, ModelError) as error:
            where = Path(body.place.path).name
            raise TraceError(f"{where}: {error}", line_number=body.place.line) from error
        return LintedPrompt(body.place, body.model, parts, tokens)

    def tokens(self, parts: RenderedParts) -> TokenArray:
        """Return the tokens of what `parts` render to. Raises InvalidRequest if the template refuses them."""
        return self._encode(self._text(parts), add_special_tokens=parts.settings is None)

    def text(self, token_ids: TokenArray) -> str:
        """Return the text of tokens, special ones included."""
        return self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)

    def _text(self, parts: RenderedParts) -> str:
        if parts.settings is None:
            return str(parts.messages[0]["content"])
        settings = dict(parts.settings)
        opens = settings.pop(_OPENS)
        if parts.template is not None:
            settings["chat_template"] = parts.template
        return self.tokenizer.render_chat(
            parts.messages, tools=parts.tools, add_generation_prompt=opens, template_kwargs=settings
        )

    def _encode(self, text: str, *, add_special_tokens: bool) -> TokenArray:
        found: list[TokenArray] = []
        at = 0
        for mark in IMAGE_MARK.finditer(text):
            found.append(self.tokenizer.encode(text[at : mark.start()], add_special_tokens=False))
            found.append(image_ids(bytes.fromhex(mark.group()[1:-1]), self._num_image_tokens))
            at = mark.end()
        if not found:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        found.append(self.tokenizer.encode(text[at:], add_special_tokens=False))
        joined: TokenArray = np.concatenate(found)
        return joined

    def _parts(self, body: Body) -> RenderedParts:
        if body.chat is None:
            ids = body.token_ids
            text = body.text if ids is None else self.tokenizer.decode(ids, skip_special_tokens=False)
            return RenderedParts(({"role": "", "content": text},))
        given = [_with_marks(message) for message in without_nonces(body.chat.messages)]
        return _parts_of(self.tokenizer, self._rules, body.chat, given)

    def _frame(self) -> int:
        """Return how many characters two prompts have in common behind the text of their only message."""
        try:
            text = self.tokenizer.render_chat([{"role": "user", "content": "Qone"}])
        except InvalidRequest:  # no template, or one that wants other messages
            return 0
        return len(text.rpartition("Qone")[2])


def _parts_of(
    tokenizer: Tokenizer, rules: TemplateRules, body: ChatRequest, given: Sequence[Message]
) -> RenderedParts:
    own = body.chat_template
    conversation, _ = conversation_of(tokenizer, TemplateRules() if own else rules, body, given, sees=False)
    settings = dict(conversation.arguments)
    settings[_OPENS] = conversation.add_generation_prompt
    if conversation.continue_final_message:
        settings["continue_final_message"] = True
    same = own is None or own == tokenizer.chat_template
    return RenderedParts(
        tuple(conversation.messages), tuple(conversation.tools or ()), settings, None if same else own
    )


def _with_marks(message: Message) -> Message:
    """Return a message with a mark in place of each image: equal images have equal marks."""
    content = message.content
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return message
    marked = [{"type": "text", "text": _mark(part)} if _is_image(part) else part for part in content]
    return message.model_copy(update={"content": marked})


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _mark(part: Mapping[str, Any]) -> str:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    return f"\ufffc{hashlib.blake2b(str(url).encode(), digest_size=16).hexdigest()}\ufffc"


def with_message(parts: RenderedParts, number: int, content: str) -> RenderedParts:
    """Return `parts` with another text in a message."""
    messages = list(parts.messages)
    messages[number] = {**messages[number], "content": content}
    return replace(parts, messages=tuple(messages))
