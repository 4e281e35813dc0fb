"""From the bytes of a request body to a validated model, with errors that name the field."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from stemma.errors import BodyTooLarge, ClientDisconnected, InvalidRequest
from stemma.server.context import context_of

M = TypeVar("M", bound=BaseModel)


async def read_object(request: Request) -> dict[str, Any]:
    """Read the body, which must be one JSON object within the size limit; else raise InvalidRequest."""
    limit = context_of(request).settings.server.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(f"the body has {declared} bytes; the limit is {limit}")
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise BodyTooLarge(f"the body exceeds the limit of {limit} bytes")
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientDisconnected("the client left while sending its request") from error
    try:
        parsed = orjson.loads(b"".join(chunks))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body must be a JSON object")
    return parsed


def validate(model: type[M], body: dict[str, Any]) -> M:
    """Return `body` as `model`; raise InvalidRequest naming a field that doesn't fit.

    Of several errors the deepest is reported: where a field may be of two types, that is the likelier one.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(errors, key=lambda entry: len(entry["loc"]))
        where = _path(first["loc"])
        raise InvalidRequest(f"{where or 'request'}: {first['msg']}", param=where or None) from error


def _path(location: tuple[int | str, ...]) -> str:
    """Return e.g. ``messages[0].role``; names of union members, which pydantic adds, are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not (path and part in {"str", "int", "float", "bool", "dict"}):
            path += f".{part}" if path else part
    return path
