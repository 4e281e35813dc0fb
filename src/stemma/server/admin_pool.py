"""`/admin/pool`: attach a pool to a running server, detach it, and see how it is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stemma.config.settings import PoolSettings
from stemma.engine.operator.pool_attachment import PoolAttachment
from stemma.errors import ConfigError, InvalidRequest, StorageError
from stemma.memory.tiers.pool.store import PoolStatus
from stemma.server.body import read_object, validate
from stemma.server.context import context_of
from stemma.server.errors import OpenAIRoute, json_response

router = APIRouter(route_class=OpenAIRoute)


@router.get("/admin/pool")
async def show_pool(request: Request) -> Response:
    """Whether a pool is attached, whether it answers, and what became of its blocks."""
    return json_response(_shown(_pool_of(request).status()))


@router.post("/admin/pool")
async def attach_pool(request: Request) -> Response:
    """Attach a pool; the body has the fields of `PoolSettings`: ``{"name": "redis", "config": "r.json"}``."""
    settings = validate(PoolSettings, await read_object(request))
    pool = _pool_of(request)
    if pool.status() is not None:
        return _failed("there is a pool already; detach it first", 409)
    try:
        await context_of(request).engine.attach_pool(settings)
    except ConfigError as error:
        raise InvalidRequest(str(error)) from error
    except StorageError as error:
        return _failed(str(error), 503)
    return json_response(_shown(pool.status()))


@router.delete("/admin/pool")
async def detach_pool(request: Request) -> Response:
    """Detach the pool, once queued writes are done; what is in it stays there."""
    if not await context_of(request).engine.detach_pool():
        return _failed("there is no pool", 404)
    return json_response(_shown(None))


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
    detail = {"message": message, "type": "server_error", "param": None, "code": None}
    return json_response({"error": detail}, status)
