"""Adapters while the server runs: vLLM's ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``.

Who loads an adapter names a path on this machine. So both are the operator's, off unless directories were
allowed, and nothing outside these is read, links resolved.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from stemma.errors import AdapterError, InvalidRequest, NotFound
from stemma.server.errors import openai_error
from stemma.server.openapi import takes
from stemma.server.operator.context import OperatorContext, context_of
from stemma.server.routes import OPERATOR, TEXT_TYPE, Router
from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import Name
from stemma.server.turn.body import read_object, validate

router = Router(openai_error)
_MAX_PATH = 4096


class LoadAdapterRequest(RequestModel):
    """Body of ``POST /v1/load_lora_adapter``."""

    lora_name: Name
    lora_path: str = Field(min_length=1, max_length=_MAX_PATH)
    """A directory on the server."""


class UnloadAdapterRequest(RequestModel):
    """Body of ``POST /v1/unload_lora_adapter``."""

    lora_name: Name


@router.post("/v1/load_lora_adapter", OPERATOR, sends=(TEXT_TYPE,), openapi_extra=takes(LoadAdapterRequest))
async def load_adapter(request: Request) -> Response:
    """Serve the adapter in ``lora_path`` as ``lora_name``."""
    context = context_of(request)
    folders = _allowed(context)
    body = validate(LoadAdapterRequest, await read_object(request))
    if "\0" in body.lora_path:
        raise InvalidRequest("lora_path is no path", param="lora_path")
    path = Path(body.lora_path)
    try:
        await asyncio.to_thread(context.engine.adapters.load, body.lora_name, path, within=folders)
    except AdapterError as error:
        raise InvalidRequest(str(error), param="lora_path") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter", OPERATOR, sends=(TEXT_TYPE,), openapi_extra=takes(UnloadAdapterRequest)
)
async def unload_adapter(request: Request) -> Response:
    """Serve ``lora_name`` no more; requests under way end as they began."""
    context = context_of(request)
    _allowed(context)
    body = validate(UnloadAdapterRequest, await read_object(request))
    context.engine.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _allowed(context: OperatorContext) -> tuple[Path, ...]:
    folders = context.settings.server.lora_directories
    if not folders:
        raise NotFound("adapters can't be loaded while this server runs: see --lora-directories")
    return folders
