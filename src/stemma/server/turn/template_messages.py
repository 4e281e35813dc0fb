"""From the messages of a chat request to what chat templates read, and to the images in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stemma.engine.core.validation import NO_IMAGES
from stemma.errors import InvalidRequest
from stemma.model.vision.sources import ImageSource, image_part, in_parts, name_of, text_part
from stemma.server.schemas.openai import PARTS, Message
from stemma.server.turn.call_arguments import arguments_text, call_arguments
from stemma.server.turn.template_roles import REASONING_FIELDS, in_roles, reasoning_fields
from stemma.server.turn.template_rules import TemplateRules

_OTHER_NAMES = ("thinking", "reasoning_details")
"""Other names for reasoning."""


def template_messages(
    messages: Sequence[Message], *, sees: bool, rules: TemplateRules
) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Return messages as a template with `rules` takes them, and their images in order.

    Content is one string, or a list of parts for models that read images (`sees`). Raises InvalidRequest
    naming the message.
    """
    images: list[ImageSource] = []
    names: dict[str, str] = {}
    found = []
    for number, message in enumerate(messages):
        rendered = _rendered(message, number, rules, names)
        where = f"messages[{number}].content"
        if isinstance(message.content, list):
            rendered["content"] = _content(message.content, where, number, images if sees else None)
        found.append(rendered)
    found = in_roles(found, rules)
    return [in_parts(one) if sees else one for one in found], images


def _rendered(message: Message, number: int, rules: TemplateRules, names: dict[str, str]) -> dict[str, Any]:
    """Return a message but for a list of parts. `names`: of the calls so far, by their ids."""
    rendered = message.model_dump(exclude_none=True, exclude={"content"})
    where = f"messages[{number}]"
    if message.role == "assistant":
        _take_reasoning(rendered)
    if isinstance(message.content, str):
        rendered["content"] = message.content
    elif message.content is None and message.refusal is not None:
        rendered["content"] = message.refusal
    elif message.content is None and message.role in ("assistant", "tool"):
        rendered["content"] = ""
    elif message.content is None:
        raise InvalidRequest(f"{where} has no content", param=f"{where}.content")
    if message.tool_calls:
        rendered["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls", rules) for call in message.tool_calls
        ]
        names |= {str(call.get("id")): call["function"].get("name", "") for call in rendered["tool_calls"]}
    if message.role == "tool" and (name := names.get(str(rendered.get("tool_call_id")))):
        rendered.setdefault("name", name)
    return rendered


def _take_reasoning(rendered: dict[str, Any]) -> None:
    """Leave the reasoning of an earlier answer where templates read it, under whichever name it came."""
    given = [rendered.pop(name, None) for name in (*REASONING_FIELDS, *_OTHER_NAMES)]
    texts = [one if isinstance(one, str) else _detailed(one) for one in given]
    if text := next((text for text in texts if text), ""):
        rendered |= reasoning_fields(text)


def _detailed(details: Any) -> str:
    """Return the text in OpenRouter's list of a reasoning's parts."""
    parts = [part for part in details if isinstance(part, dict)] if isinstance(details, list) else []
    texts = [part.get("text") or part.get("summary") for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _content(
    parts: list[dict[str, Any]], where: str, number: int, images: list[ImageSource] | None
) -> str | list[dict[str, str]]:
    """Return the text of all parts; with an image among them, the parts, whose images `images` gets."""
    parts = [part for part in parts if PARTS.speaks(part)]
    if not any(part.get("type") == "image_url" for part in parts):
        return "\n".join(_text(part, where) for part in parts)
    if images is None:
        raise InvalidRequest(f"{where}: {NO_IMAGES}", param=where)
    num_before, found = len(images), []
    for part in parts:
        if part.get("type") != "image_url":
            found.append(text_part(_text(part, where)))
            continue
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, dict) else given
        if not isinstance(url, str) or not url:
            raise InvalidRequest(f"{where}: image_url needs a url", param=where)
        images.append(ImageSource(url, name_of(len(images) - num_before, number)))
        found.append(image_part())
    return found


def _text(part: dict[str, Any], where: str) -> str:
    text = part.get("refusal" if part.get("type") == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}: a part has no text", param=where)
    return text


def _tool_call(call: dict[str, Any], where: str, rules: TemplateRules) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}: each needs a function object", param=where)
    given = function.get("arguments")
    arguments = given if isinstance(given, dict) else call_arguments(given if isinstance(given, str) else "")
    if rules.argument_objects:
        return {**call, "function": {**function, "arguments": arguments}}
    return {**call, "function": {**function, "arguments": arguments_text(given, arguments)}}
