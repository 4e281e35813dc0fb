"""From the bytes of a request body to a validated model, with errors that name the field."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from stemma.errors import InvalidRequest
from stemma.server.door.access import tenant_of
from stemma.server.door.caller import caller
from stemma.server.observe.ignored_hints import count_hint
from stemma.server.schemas.base import Kinds, RequestModel, objects_at, path_of
from stemma.server.schemas.bounds import MAX_FIELDS
from stemma.server.schemas.json_input import max_values_of, parse_json
from stemma.server.transport.incoming import limited_chunks
from stemma.server.turn.intake import intake_of

M = TypeVar("M", bound=BaseModel)
logger = logging.getLogger(__name__)

_SMALL_BYTES = 64 * 1024
"""Smaller bodies are parsed on the event loop: a thread would take longer."""
_MAX_MESSAGE_CHARS = 500
_MAX_LOGGED_FIELDS = 256
_MAX_FIELD_CHARS = 64
_logged_fields: set[str] = set()
"""Unknown fields that were logged; each is logged once per process."""


async def read_bytes(request: Request) -> bytes:
    """Read the body; raise BodyTooLarge beyond `max_body_bytes`."""
    chunks = [chunk async for chunk in body_chunks(request)]
    return b"".join(chunks)


async def body_chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it comes; raise BodyTooLarge beyond `max_body_bytes`.

    What came is held until the request is answered. Raises RateLimited or Overloaded if bodies hold too much.
    """
    limit = intake_of(request).settings.server.max_body_bytes
    tenant = tenant_of(request)
    if tenant is not None and tenant.entry.max_body_bytes is not None:
        limit = min(limit, tenant.entry.max_body_bytes)
    bodies, one = intake_of(request).bodies, caller()
    limit = min(limit, bodies.most(one.tenant))
    async for chunk in limited_chunks(request, limit):
        one.holding.take(bodies, len(chunk), one.tenant)
        yield chunk


async def read_object(request: Request) -> dict[str, Any]:
    """Read the body, which must be one JSON object within the limits; else raise InvalidRequest."""
    return await object_of(request, await read_bytes(request))


async def object_of(request: Request, data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`, the body of `request` or its beginning. Raises InvalidRequest."""
    intake = intake_of(request)
    max_values = max_values_of(intake.engine.max_model_len)
    if len(data) <= _SMALL_BYTES:
        parsed = parse_json(data, max_values=max_values)
    else:
        parsed = await intake.parse_in_thread(lambda: parse_json(data, max_values=max_values))
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body must be a JSON object")
    _take_options(request, parsed)
    return parsed


class StemmaOptions(RequestModel):
    """``stemma`` in the body of any request: what to tell beside the answer."""

    explain: bool = False
    receipt: bool | Literal["hashed"] = False
    """A signed statement of what was computed; ``hashed``: without ids and texts."""


def _take_options(request: Request, body: dict[str, Any]) -> None:
    """Take ``stemma`` out of the body and leave what it asks for with the request: every API has it."""
    given = body.pop("stemma", None)
    if given is None:
        return
    if not isinstance(given, dict):
        raise InvalidRequest("stemma must be an object", param="stemma")
    options = validate(StemmaOptions, given)
    request.state.explain, request.state.receipt = options.explain, options.receipt


def validate(model: type[M], body: dict[str, Any]) -> M:
    """Return `body` as `model`; raise InvalidRequest naming a field that doesn't fit.

    Of several errors the deepest is reported: where a field may be of two types, that is the likelier one.
    """
    if len(body) > MAX_FIELDS:
        raise InvalidRequest(f"the body has more than {MAX_FIELDS} fields")
    if issubclass(model, RequestModel):
        _review(model, body)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(errors, key=lambda entry: len(entry["loc"]))
        where = _path(first["loc"])
        message = f"{where or 'request'}: {first['msg']}"[:_MAX_MESSAGE_CHARS]
        raise InvalidRequest(message, param=where or None) from error


def _review(model: type[RequestModel], body: dict[str, Any], prefix: str = "") -> None:
    _refuse(model, body, prefix)
    _log_unknown(model, body)
    for name in model.hints & body.keys():
        if body[name] is not None:
            count_hint(prefix + name)
    for place, kinds in model.kinds.items():
        _review_kinds(kinds, body, place)
    for name, inner in model.nested.items():
        if isinstance(body.get(name), dict):
            _review(inner, body[name], f"{prefix}{name}.")


def _review_kinds(kinds: Kinds, body: dict[str, Any], place: str) -> None:
    """Count what is skipped, each kind once; raise InvalidRequest for what is refused."""
    skipped = set()
    for one in objects_at(body, place):
        treatment = kinds.treatment(one)
        if treatment == "refused":
            where, shown = path_of(one, body, place), str(one.get("type"))[:_MAX_FIELD_CHARS]
            raise InvalidRequest(
                f"{where}: {kinds.noun} of type {shown!r} are not supported", param=f"{where}.type"
            )
        if treatment == "skipped":
            kind = kinds.kind(one)
            skipped.add(kind if kind in kinds.skipped else "other")
    for kind in skipped:
        count_hint(f"{place}.{kind}")


def _refuse(model: type[RequestModel], body: dict[str, Any], prefix: str) -> None:
    """Raise InvalidRequest for a field that would change the answer and that Stemma doesn't implement."""
    for name, neutral in model.refused.items():
        given = body.get(name)
        if given is not None and not any(_equal(given, value) for value in neutral):
            where = prefix + name
            raise InvalidRequest(f"{where} is not supported", param=where)


def _equal(given: Any, neutral: Any) -> bool:
    return type(given) is type(neutral) and bool(given == neutral)


def _log_unknown(model: type[RequestModel], body: dict[str, Any]) -> None:
    for name in body.keys() - model.known_names():
        short = name[:_MAX_FIELD_CHARS]
        if short not in _logged_fields and len(_logged_fields) < _MAX_LOGGED_FIELDS:
            _logged_fields.add(short)
            logger.warning("field %a of a request is unknown and ignored (logged once)", short)


def _path(location: tuple[int | str, ...]) -> str:
    """Return e.g. ``messages[0].role``; names of union members, which pydantic adds, are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not (path and part in {"str", "int", "float", "bool", "dict"}):
            path += f".{part}" if path else part
    return path[:_MAX_MESSAGE_CHARS]
