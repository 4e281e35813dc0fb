"""The operator's plane of the cache: lookup, prewarm, pin, flush, export and import.

A prompt is given as ``prompt`` (text or token ids) or as ``messages``; ``cache_salt``, as in the completion
APIs, and ``tenant`` name its namespace. So what an operator pins is what a client will hit.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from stemma.engine.operator.cache_answers import CacheLookup, Pin
from stemma.errors import Forbidden, InvalidRequest, StorageError, UntrustedFile
from stemma.memory.tiers.bundle import BundleTrust
from stemma.model.lora.adapter import Adapter
from stemma.prefix.keys import Namespace
from stemma.server.door.access import BYTES_TYPE
from stemma.server.door.namespace import tenant_namespace
from stemma.server.errors import json_response, openai_error
from stemma.server.observe.tier_metrics import tiers_as_json
from stemma.server.openapi import parameter, takes, takes_file
from stemma.server.operator.context import OperatorContext, context_of
from stemma.server.operator.prompts import PromptRequest, prewarm_prompt, prompt_tokens
from stemma.server.routes import OPERATOR, Router
from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import MAX_SALT_CHARS, Name, Priority, Salt, Ttl
from stemma.server.turn.body import body_chunks, read_object, validate
from stemma.server.turn.models import check_model
from stemma.types import DEFAULT_PRIORITY, Retention, RetentionHint, Tier, TokenArray

router = Router(openai_error, prefix="/admin/cache")
file_router = Router(openai_error, prefix="/admin/cache", media_type=BYTES_TYPE)
_CHUNK_BYTES = 1 << 20


class PrefixRequest(PromptRequest):
    """A prompt, and whose."""

    cache_salt: Salt | None = None
    tenant: Name | None = None
    """Whose; needed where a file of API keys names tenants."""


class PinRequest(PrefixRequest):
    """A prompt to pin, and for how long."""

    ttl_s: Ttl | None = None


class PrewarmRequest(PinRequest):
    """A prompt to compute ahead, and how to keep it."""

    priority: Priority = DEFAULT_PRIORITY
    pin: bool = False


class UnpinRequest(RequestModel):
    """The pin to end."""

    pin_id: Name


@router.get("/tiers", OPERATOR)
async def tiers(request: Request) -> Response:
    """Counters and gauges of the tiers below the device."""
    stats = await context_of(request).engine.stats()
    return json_response({"tiers": {}} if stats.transfer is None else tiers_as_json(stats.transfer))


@router.post("/lookup", OPERATOR, openapi_extra=takes(PrefixRequest))
async def lookup(request: Request) -> Response:
    """How many tokens of a prompt are in which tier; computes and moves nothing."""
    context, body = context_of(request), validate(PrefixRequest, await read_object(request))
    place = await _place(context, body)
    found = await context.engine.cache_control.lookup(place.namespace, place.tokens)
    return json_response(_lookup_json(found))


@router.post("/prewarm", OPERATOR, openapi_extra=takes(PrewarmRequest))
async def prewarm(request: Request) -> Response:
    """Compute a prompt ahead of its first use, with retention hints; pin it if asked."""
    context, body = context_of(request), validate(PrewarmRequest, await read_object(request))
    place = await _place(context, body)
    retention = Retention(RetentionHint(body.priority, body.ttl_s))
    cache = await prewarm_prompt(context, place.tokens, place.namespace, place.adapter, retention)
    answer: dict[str, Any] = {
        "num_prompt_tokens": cache.num_prompt_tokens,
        "num_cached_tokens": cache.num_cached_tokens,
        "cached_by_tier": _by_tier(cache.cached_by_tier),
    }
    if body.pin:
        pin = await context.engine.cache_control.pin(place.namespace, place.tokens, body.ttl_s)
        answer["pin"] = _pin_json(pin)
    return json_response(answer)


@router.post("/pin", OPERATOR, openapi_extra=takes(PinRequest))
async def pin(request: Request) -> Response:
    """Forbid eviction of a prompt's cached blocks."""
    context, body = context_of(request), validate(PinRequest, await read_object(request))
    place = await _place(context, body)
    made = await context.engine.cache_control.pin(place.namespace, place.tokens, body.ttl_s)
    return json_response(_pin_json(made))


@router.post("/unpin", OPERATOR, openapi_extra=takes(UnpinRequest))
async def unpin(request: Request) -> Response:
    """Permit eviction again."""
    body = validate(UnpinRequest, await read_object(request))
    gone = await context_of(request).engine.cache_control.unpin(body.pin_id)
    return json_response(_pin_json(gone))


@router.get("/pins", OPERATOR)
async def pins(request: Request) -> Response:
    """All pins."""
    held = context_of(request).engine.cache_control.pins()
    return json_response({"pins": [_pin_json(one) for one in held]})


@router.post("/flush", OPERATOR)
async def flush(request: Request) -> Response:
    """Drop every block that no request or pin holds, from device, host and disk, and the ids of all answers.

    Says what really went.
    """
    context = context_of(request)
    report = await context.engine.cache_control.flush()
    num_answers = 0 if context.history is None else await asyncio.to_thread(context.history.flush)
    return json_response(
        {
            "num_dropped_blocks": sum(report.freed_blocks.values()),
            "dropped_blocks": _by_tier(report.freed_blocks),
            "kept_blocks": _by_tier(report.kept_blocks),
            "freed_bytes": report.freed_bytes,
            "num_dropped_answers": num_answers,
        }
    )


@router.post("/export", OPERATOR, sends=(BYTES_TYPE,), openapi_extra=takes(PrefixRequest))
async def export(request: Request) -> Response:
    """The cached leading blocks of a prompt as a file (`memory/tiers/bundle.py`)."""
    context, body = context_of(request), validate(PrefixRequest, await read_object(request))
    place = await _place(context, body)
    file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the response
    try:
        control = context.engine.cache_control
        count = await control.export(place.namespace, place.tokens, file, key=context.bundle_key)
        if not count:
            raise InvalidRequest("nothing of this prompt is cached; prewarm it first", param="prompt")
    except BaseException:
        file.close()
        raise
    size = file.tell()
    headers = {"content-length": str(size), "x-num-blocks": str(count)}
    return StreamingResponse(_content(file), headers=headers, media_type="application/octet-stream")


@file_router.post(
    "/import",
    OPERATOR,
    openapi_extra=takes_file() | parameter("cache_salt", {"type": "string", "maxLength": MAX_SALT_CHARS}),
)
async def import_(request: Request) -> Response:
    """Take the blocks of an exported file; ``?cache_salt=&tenant=&model=`` name the namespace it is from."""
    context = context_of(request)
    salt = request.query_params.get("cache_salt", "")
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequest(f"cache_salt has more than {MAX_SALT_CHARS} characters", param="cache_salt")
    trust = BundleTrust(context.bundle_key, takes_unsigned=context.settings.server.trust_imports)
    if trust.key is None and not trust.takes_unsigned:
        raise Forbidden("this server takes no blocks from outside: see --bundle-key-file and --trust-imports")
    query = request.query_params
    adapter = check_model(context.engine, query.get("model"))
    namespace = _namespace(context, query.get("tenant"), salt, adapter)
    with tempfile.TemporaryFile() as file:
        async for chunk in body_chunks(request):
            await asyncio.to_thread(file.write, chunk)
        file.seek(0, os.SEEK_SET)
        try:
            header, num_new = await context.engine.cache_control.import_(
                partial(context.published.located, namespace), file, trust
            )
        except UntrustedFile as error:
            raise Forbidden(str(error)) from error
        except StorageError as error:
            raise InvalidRequest(str(error)) from error
    return json_response(
        {
            "num_tokens": header.num_blocks * header.space.block_size,
            "num_blocks": header.num_blocks,
            "num_new_blocks": num_new,
        }
    )


async def _content(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        file.seek(0)
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield chunk


def _namespace(
    context: OperatorContext, tenant: str | None, salt: str | None, adapter: Adapter | None
) -> Namespace:
    """Return where the requests of `tenant` with that salt find their blocks of a model or an adapter."""
    keys = context.access.keys
    asked = Namespace(salt=salt or "", adapter="" if adapter is None else adapter.key)
    if keys is None:
        if tenant is not None:
            raise InvalidRequest("this server has no tenants: see --api-keys-file", param="tenant")
        return asked
    if tenant is None or tenant not in {known.name for known in keys.tenants}:
        raise InvalidRequest("tenant: name a tenant of the file of API keys", param="tenant")
    return tenant_namespace(keys.secret, tenant, asked)


@dataclass(frozen=True, slots=True)
class _Place:
    """The prompt that an operator names, and where a client's request for it finds its blocks."""

    tokens: TokenArray
    namespace: Namespace
    adapter: Adapter | None


async def _place(context: OperatorContext, body: PrefixRequest) -> _Place:
    tokens = await prompt_tokens(context, body)
    adapter = check_model(context.engine, body.model)
    namespace = _namespace(context, body.tenant, body.cache_salt, adapter)
    return _Place(tokens, context.published.located(namespace, tokens), adapter)


def _by_tier(counts: Any) -> dict[str, int]:
    return {Tier(tier).value: count for tier, count in counts.items()}


def _lookup_json(found: CacheLookup) -> dict[str, Any]:
    return {
        "num_prompt_tokens": found.num_prompt_tokens,
        "num_cached_tokens": found.num_cached_tokens,
        "served_by_tier": _by_tier(found.served_by_tier),
        "tokens_by_tier": _by_tier(found.tokens_by_tier),
    }


def _pin_json(pin: Pin) -> dict[str, Any]:
    return {
        "pin_id": pin.pin_id,
        "num_prompt_tokens": pin.num_prompt_tokens,
        "tokens_by_tier": _by_tier(pin.tokens_by_tier),
        "ttl_s": pin.ttl_s,
    }
