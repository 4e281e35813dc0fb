"""From the messages of a chat request to what chat templates read, and to the images in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stemma.engine.core.validation import NO_IMAGES
from stemma.errors import InvalidRequest
from stemma.model.vision.sources import ImageSource, image_part, in_parts, name_of, text_part
from stemma.server.schemas.openai import Message
from stemma.server.turn.json_input import parse_json

_TEXTS = ("text", "input_text")


def template_messages(
    messages: Sequence[Message], *, sees: bool
) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Return messages as templates expect them, and their images in order.

    Content is one string, or a list of parts for models that read images (`sees`); tool arguments are an
    object. Raises InvalidRequest naming the message.
    """
    images: list[ImageSource] = []
    found = []
    for number, message in enumerate(messages):
        rendered = _rendered(message, number)
        where = f"messages[{number}].content"
        if isinstance(message.content, list):
            rendered["content"] = _content(message.content, where, number, images if sees else None)
        found.append(in_parts(rendered) if sees else rendered)
    return found, images


def _rendered(message: Message, number: int) -> dict[str, Any]:
    rendered = message.model_dump(exclude_none=True, exclude={"content"})
    where = f"messages[{number}]"
    if isinstance(message.content, str):
        rendered["content"] = message.content
    elif message.content is None and message.refusal is not None:
        rendered["content"] = message.refusal
    elif message.content is None and not message.tool_calls:
        raise InvalidRequest(f"{where} has no content", param=f"{where}.content")
    if message.tool_calls:
        rendered["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in message.tool_calls]
        rendered.setdefault("content", "")
    return rendered


def _content(
    parts: list[dict[str, Any]], where: str, number: int, images: list[ImageSource] | None
) -> str | list[dict[str, str]]:
    """Return the text of all parts; with an image among them, the parts, whose images `images` gets."""
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
    text = part.get("text")
    if part.get("type") not in _TEXTS or not isinstance(text, str):
        raise InvalidRequest(f"{where}: only text parts and images (image_url) are supported", param=where)
    return text


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}: each needs a function object", param=where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    parsed = parse_json((arguments or "{}").encode(), f"{where}: arguments")
    return {**call, "function": {**function, "arguments": parsed}}
