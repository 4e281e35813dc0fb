"""Lines that known clients put into a prompt for their own vendor, new in each session.

Nothing behind such a line could be shared between two sessions, and no model can do anything with it
(`--strip-client-nonces`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stemma.server.schemas.openai import Message

NONCES = ("x-anthropic-billing-header:",)
"""What such a line begins with: Claude Code's."""


def without_nonces(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages without such lines at the beginning of the first, if that is the system's."""
    first = messages[0]
    if first.role not in ("system", "developer"):
        return messages
    content = _stripped(first.content)
    if content is first.content:
        return messages
    kept = [first.model_copy(update={"content": content})] if content else []
    return [*kept, *messages[1:]] or messages


def _stripped(content: Any) -> Any:
    """Return a text without such lines, or a list of parts whose first one is such a text."""
    if isinstance(content, str):
        text = content
        while text.startswith(NONCES):
            text = text.partition("\n")[2].lstrip("\n")
        return text if text != content else content
    if not isinstance(content, list) or not content:
        return content
    given = content[0].get("text")
    text = _stripped(given)
    if text is given:
        return content
    return [*([{**content[0], "text": text}] if text else []), *content[1:]]
