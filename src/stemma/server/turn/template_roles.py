"""Messages in the roles and the order that a chat template takes.

Each rule looks at neighbours alone and joins text at places that later turns don't change: the prompt of a
conversation that grows begins with the prompt that it had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from stemma.model.vision.sources import text_part
from stemma.server.turn.template_rules import TemplateRules

Message = dict[str, Any]
REASONING_FIELDS = ("reasoning_content", "reasoning")
"""transformers adds ``thinking``, GPT-OSS's name."""
_GAP = "\n\n"
_LATE = "<system>\n{}\n</system>"
"""How a system message stands in a user's turn."""
_ID_CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHORT_ID_CHARS = 9


def reasoning_fields(text: str) -> Message:
    """Return the reasoning of an earlier answer under the names that templates read it by."""
    return dict.fromkeys(REASONING_FIELDS, text)


def in_roles(messages: Sequence[Message], rules: TemplateRules) -> list[Message]:
    """Return the messages as a template with `rules` takes them.

    System messages at the beginning, and those right behind the user's first words, become one, or go before
    these words: what an agent says of its surroundings is the same in its next session, the task isn't. A
    later one is joined to the turn before it, a user's or a tool's; behind an answer it opens the user's
    turn. Where turns must alternate, neighbours of one role are joined.
    """
    head, rest = _headed([_renamed(message, rules) for message in messages])
    if not rules.late_system:
        rest = _without_system(rest)
    if not rules.system and head:
        head = [{"role": "user", "content": _all(head)}]
        if rest and rest[0]["role"] == "user":
            head, rest = [], [_joined(rest[0], head[0]["content"], before=True), *rest[1:]]
    elif not rules.several_system and len(head) > 1:
        head = [{**head[0], "content": _all(head)}]
    return [*head, *_alternating(rest, rules)]


def _headed(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Return the system messages that open the conversation, and the rest."""
    num_head = next((number for number, one in enumerate(messages) if not _is_system(one)), len(messages))
    end = behind = num_head + 1
    if num_head < len(messages) and messages[num_head]["role"] == "user":
        end = next((n for n in range(behind, len(messages)) if not _is_system(messages[n])), len(messages))
    head = [*messages[:num_head], *messages[behind:end]]
    return head, [*messages[num_head:behind], *messages[end:]]


def _is_system(message: Message) -> bool:
    return message["role"] in ("system", "developer")


def _renamed(message: Message, rules: TemplateRules) -> Message:
    """Return a message with the role and the ids of calls that the template knows."""
    if message["role"] == "developer" and not rules.developer:
        message = {**message, "role": "system"}
    if not rules.long_ids:
        message = _with_short_ids(message)
    if message.get("tool_calls") and not rules.reasoning_and_text and message.get("content"):
        return _thought_before_call(message)
    return message


def _with_short_ids(message: Message) -> Message:
    if isinstance(message.get("tool_call_id"), str):
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    if message.get("tool_calls"):
        calls = [{**call, "id": _short_id(str(call.get("id")))} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    return message


def _short_id(call_id: str) -> str:
    """Return nine letters and digits, always the same for one id."""
    if len(call_id) == _SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode(errors="replace")).digest())
    digits = []
    for _ in range(_SHORT_ID_CHARS):
        number, digit = divmod(number, len(_ID_CHARS))
        digits.append(_ID_CHARS[digit])
    return "".join(digits)


def _thought_before_call(message: Message) -> Message:
    """Return a message with the text before its calls as part of its reasoning, if it has one."""
    thought = message.get(REASONING_FIELDS[0])
    if not thought or not isinstance(message["content"], str):
        return message
    return {**message, **reasoning_fields(f"{thought}{_GAP}{message['content']}"), "content": ""}


def _without_system(messages: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    pending: list[Any] = []
    for message in messages:
        if _is_system(message):
            text = _late(message.get("content"))
            if not pending and found and found[-1]["role"] in ("user", "tool"):
                found[-1] = _joined(found[-1], text)
            else:
                pending.append(text)
            continue
        if pending:
            opening = {"role": "user", "content": _all([{"content": text} for text in pending])}
            pending = []
            if message["role"] == "user":
                message = _joined(message, opening["content"], before=True)
            else:
                found.append(opening)
        found.append(message)
    if pending:
        found.append({"role": "user", "content": _all([{"content": text} for text in pending])})
    return found


def _late(content: Any) -> Any:
    if isinstance(content, list):
        head, tail = _LATE.split("{}")
        return [text_part(head), *content, text_part(tail)]
    return _LATE.format(content or "")


def _alternating(messages: Sequence[Message], rules: TemplateRules) -> list[Message]:
    """Return the messages with turns joined to those before them, where roles must alternate."""
    found: list[Message] = []
    for message in messages:
        if found and _joins(found[-1], message, rules):
            found[-1] = {**message, **_joined(found[-1], message.get("content"))}
        else:
            found.append(message)
    return found


def _joins(last: Message, message: Message, rules: TemplateRules) -> bool:
    """Whether a message can't stand behind `last` by itself."""
    roles = (last["role"], message["role"])
    if roles == ("assistant", "assistant"):
        return not rules.repeated_user and not last.get("tool_calls")
    return (roles == ("user", "user") and not rules.repeated_user) or (
        roles == ("tool", "user") and not rules.user_after_tool
    )


def _joined(message: Message, content: Any, *, before: bool = False) -> Message:
    """Return a message with more content behind its own, or before it."""
    own = message.get("content")
    return {**message, "content": _both(content, own) if before else _both(own, content)}


def _all(messages: Sequence[Message]) -> Any:
    found: Any = ""
    for message in messages:
        found = _both(found, message.get("content"))
    return found


def _both(first: Any, second: Any) -> Any:
    """Return two contents, texts or lists of parts, as one."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{_GAP}{second}"
    parts = [one if isinstance(one, list) else [text_part(one)] for one in (first, second)]
    return [*parts[0], text_part(_GAP), *parts[1]]
