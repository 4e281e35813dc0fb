"""Reads prompts as a server of the same checkpoint does: its template, and what requests tell it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stemma.config.server_settings import ServerSettings
from stemma.server.apis.messages.blocks import chat_fields as of_messages
from stemma.server.apis.responses.items import chat_fields as of_responses
from stemma.server.schemas.messages import MessagesRequest
from stemma.server.schemas.openai import ChatRequest
from stemma.server.schemas.responses import ResponsesRequest
from stemma.server.turn.body import validate
from stemma.server.turn.client_nonces import without_nonces
from stemma.server.turn.prompts import conversation_of
from stemma.server.turn.template_rules import TemplateRules
from stemma.types import TokenArray
from stemma_router.routing.prompts import messages_of, text_of

if TYPE_CHECKING:  # torch isn't needed to pass requests on
    from stemma.model.text.tokenizer import Tokenizer


class PromptReader:
    """One checkpoint's prompts. Any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _rules(self) -> TemplateRules:
        return TemplateRules.of(self._tokenizer, sees=False)

    def read(self, path: str, body: dict[str, Any]) -> TokenArray:
        """Return the ids of a prompt. Raises InvalidRequest for one that servers would refuse."""
        if messages_of(body) is None:
            return self._tokenizer.encode(text_of(body) or "")
        chat = self._chat(path, body)
        given = without_nonces(chat.messages) if ServerSettings().strip_client_nonces else chat.messages
        said, _ = conversation_of(self._tokenizer, self._rules, chat, given, sees=False)
        going_on = {"continue_final_message": True} if said.continue_final_message else {}
        return self._tokenizer.apply_chat_template(
            said.messages,
            tools=said.tools,
            add_generation_prompt=said.add_generation_prompt,
            template_kwargs={**said.arguments, **going_on},
        )

    @staticmethod
    def _chat(path: str, body: Mapping[str, Any]) -> ChatRequest:
        """Return the chat request that means the same."""
        given = {"model": "", **body}
        if path == "/v1/messages":
            given = of_messages(validate(MessagesRequest, {"max_tokens": 1, **given}))
        elif path == "/v1/responses":
            said = [one for one in messages_of(body) or () if isinstance(one, dict)]
            given = of_responses(validate(ResponsesRequest, given), said)
        return validate(ChatRequest, given)
