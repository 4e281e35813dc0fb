"""`/admin/pool`: attach a pool to a running server, detach it, and see how it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from stemma.config.settings import PoolSettings, WritePolicy
from stemma.engine.operator.pool_attachment import PoolAttachment
from stemma.errors import ConfigError, InvalidRequest, NotFound, StorageError
from stemma.memory.tiers.pool.pool_store import PoolStatus
from stemma.server.errors import json_response, openai_body, openai_error
from stemma.server.openapi import takes
from stemma.server.operator.context import OperatorContext, context_of
from stemma.server.routes import OPERATOR, Router
from stemma.server.schemas.base import RequestModel
from stemma.server.schemas.bounds import Name
from stemma.server.turn.body import read_object, validate

router = Router(openai_error)


class AttachRequest(RequestModel):
    """A pool that the server was started with (`--pool`, `--pool-configs`); files are never named here."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"config": (), "path": ()}

    name: Name
    async_write: bool | None = None
    write: WritePolicy | None = None
    staging: Annotated[int, Field(ge=2**20, le=2**40)] | None = None
    """Bytes."""
    deadline_s: Annotated[float, Field(gt=0.0, le=3600.0)] | None = None


@router.get("/admin/pool", OPERATOR)
async def show_pool(request: Request) -> Response:
    """Whether a pool is attached, whether it answers, and what became of its blocks."""
    return json_response(_shown(_pool_of(request).status()))


@router.post("/admin/pool", OPERATOR, openapi_extra=takes(AttachRequest))
async def attach_pool(request: Request) -> Response:
    """Attach a pool that the server was started with: ``{"name": "redis", "write": "write_back"}``."""
    context = context_of(request)
    settings = _settings(context, validate(AttachRequest, await read_object(request)))
    pool = _pool_of(request)
    if pool.status() is not None:
        return _failed("there is a pool already; detach it first", 409)
    try:
        await context.engine.attach_pool(settings)
    except ConfigError as error:
        raise InvalidRequest(str(error)) from error
    except StorageError as error:
        return _failed(str(error), 503)
    return json_response(_shown(pool.status()))


@router.delete("/admin/pool", OPERATOR)
async def detach_pool(request: Request) -> Response:
    """Detach the pool, once queued writes are done; what is in it stays there."""
    if not await context_of(request).engine.detach_pool():
        raise NotFound("there is no pool")
    return json_response(_shown(None))


def _settings(context: OperatorContext, body: AttachRequest) -> PoolSettings:
    started_with = context.settings.engine.cache.pool
    configs = context.settings.server.pool_configs
    if started_with is not None and started_with.name == body.name:
        base = started_with
    elif body.name in configs:
        base = PoolSettings(name=body.name, config=configs[body.name])
    else:
        known = sorted({*configs, *([] if started_with is None else [started_with.name])})
        raise InvalidRequest(
            f"this server was started without a pool called {body.name!r}; "
            f"it has: {', '.join(known) or 'none (see --pool-configs)'}",
            param="name",
        )
    return base.model_copy(update=body.model_dump(exclude={"name"}, exclude_none=True))


def _pool_of(request: Request) -> PoolAttachment:
    pool = context_of(request).engine.pool
    if pool is None:
        raise InvalidRequest("a pool needs the prefix cache, which is off")
    return pool


def _shown(status: PoolStatus | None) -> dict[str, Any]:
    if status is None:
        return {"attached": False}
    counters = status.counters
    return {
        "attached": True,
        "name": status.name,
        "circuit": status.circuit.value,
        "num_opened": status.num_opened,
        "last_error": status.last_error,
        "reads": {result.value: count for result, count in counters.reads.items()},
        "puts": {result.value: count for result, count in counters.puts.items()},
        "reasons": dict(counters.reasons),
        "read_bytes": counters.read_bytes,
        "written_bytes": counters.written_bytes,
    }


def _failed(message: str, status: int) -> Response:
    return json_response(openai_body(message, "server_error"), status)
