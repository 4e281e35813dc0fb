"""Images as requests hold them: parts of messages, and the bytes in ``data:`` URLs."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from stemma.errors import InvalidRequest
from stemma.model.vision.decoding import ImageLimits

_DATA = "data:"


@dataclass(frozen=True, slots=True, eq=False)
class ImageSource:
    """An image of a conversation that is still to be read."""

    given: Any
    """A ``data:``, ``http:`` or ``https:`` URL, a file's bytes, or an image of Pillow's."""
    name: str
    """Says where it stands, e.g. ``image 2 of message 3``."""


def image_part() -> dict[str, str]:
    """Return the part of a message that a chat template shows as an image."""
    return {"type": "image"}


def text_part(text: str) -> dict[str, str]:
    """Return the part of a message that is text."""
    return {"type": "text", "text": text}


def image_url_part(url: str) -> dict[str, Any]:
    """Return the part of a chat request that is an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its text as a list of parts: what templates of vision models read."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [text_part(content)]}
    return dict(message)


def name_of(number: int, message: int) -> str:
    """Return the name of image `number` of message `message`, both from 0."""
    return f"image {number + 1} of message {message + 1}"


def split_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Return messages as templates of vision models read them, and their images in order.

    An image is a part ``{"type": "image", "image": ...}`` or, as OpenAI has it, ``{"type": "image_url",
    "image_url": {"url": ...}}``. Raises InvalidRequest for another part.
    """
    found: list[ImageSource] = []
    result: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        content, num_before = message.get("content"), len(found)
        if not isinstance(content, list):
            result.append(in_parts(message))
            continue
        parts: list[dict[str, str]] = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text" and isinstance(part.get("text"), str):
                parts.append(text_part(part["text"]))
                continue
            given = part.get("image") if kind == "image" else part.get("image_url") if kind else None
            given = given.get("url") if isinstance(given, Mapping) else given
            if kind not in ("image", "image_url") or given is None:
                raise InvalidRequest(
                    f"messages[{number}]: parts are text, image or image_url", param="messages"
                )
            found.append(ImageSource(given, name_of(len(found) - num_before, number)))
            parts.append(image_part())
        result.append({**message, "content": parts})
    return result, found


def is_data_url(url: str) -> bool:
    """Whether a URL holds its bytes."""
    return url[: len(_DATA)].lower() == _DATA


def bytes_of_data_url(url: str, limits: ImageLimits, name: str) -> bytes:
    """Return the bytes that a ``data:`` URL holds. Raises InvalidRequest."""
    head, comma, data = url[len(_DATA) :].partition(",")
    if not comma:
        raise InvalidRequest(f"{name}: a data: URL has a comma before its bytes", param="messages")
    if head.lower().endswith(";base64"):
        return bytes_of_base64(data, limits, name)
    if len(data) > 3 * limits.max_bytes:
        raise InvalidRequest(f"{name} has more than {limits.max_bytes} bytes", param="messages")
    return unquote_to_bytes(data)


def bytes_of_base64(data: str, limits: ImageLimits, name: str) -> bytes:
    """Return the bytes in a base64 text. Raises InvalidRequest."""
    if len(data) > 4 * (limits.max_bytes // 3 + 2):
        raise InvalidRequest(f"{name} has more than {limits.max_bytes} bytes", param="messages")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{name} isn't base64: {error}", param="messages") from error
