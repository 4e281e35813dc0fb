"""MindIE's management plane: health, slots, status, configuration, stop."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stemma.engine.api import EngineStats
from stemma.errors import Forbidden, InvalidRequest, UnknownModel
from stemma.server.errors import json_response, openai_error, tgi_error
from stemma.server.operator.context import OperatorContext, context_of
from stemma.server.routes import OPERATOR, PUBLIC, SUMS, TENANT, Router
from stemma.server.turn.models import served_names
from stemma.types import Tier

open_router = Router(openai_error, other_shapes=(tgi_error,))
"""Health needs no API key: load balancers ask it."""
router = Router(tgi_error)
stop_router = Router(openai_error, other_shapes=(tgi_error,))

MAX_TIMED_S = 600
DEFAULT_TIMED_S = 600
FORCED_DRAIN_S = 5.0
_BUSY = "Service is alive but busy"
_TIMED = re.compile(r"-([1-9][0-9]{0,2})")


@open_router.get("/v2/health/live", PUBLIC, sends=())
async def live(request: Request) -> Response:
    """200 while the process can serve, busy or not; 500 once the engine has failed."""
    context = context_of(request)
    if (abnormal := _abnormal(context)) is not None:
        return abnormal
    return json_response({"message": _BUSY}) if await _is_busy(context) else Response()


@open_router.get("/v2/health/ready", PUBLIC, sends=())
async def ready(request: Request) -> Response:
    """200 while new requests are taken at once; 503 when the queue is full or the server drains."""
    return await _readiness(context_of(request))


@open_router.get("/v2/models/{model}/ready", PUBLIC, sends=())
async def model_ready(request: Request) -> Response:
    """The same for the one model; 404 for others."""
    context = context_of(request)
    name = request.path_params["model"]
    if name not in served_names(context.engine):
        return tgi_error(UnknownModel(f"Model {name[:256]} not found.", param="model"))
    return await _readiness(context)


async def _readiness(context: OperatorContext) -> Response:
    if (abnormal := _abnormal(context)) is not None:
        return abnormal
    if context.lifecycle.draining:
        return json_response({"message": "Service is stopping"}, 503)
    if await _is_busy(context):
        return json_response({"message": f"{_BUSY}. Consider reducing request frequency"}, 503)
    return Response()


def _abnormal(context: OperatorContext) -> Response | None:
    why = context.engine.failure
    if why is None and context.lifecycle.maintenance is not None:
        why = "the engine is paused (CMD_PAUSE_ENGINE)"
    return None if why is None else json_response({"message": f"Service is abnormal: {why}"}, 500)


async def _is_busy(context: OperatorContext) -> bool:
    """Whether the queue is full: the next request would be refused."""
    if context.lifecycle.draining:
        return False
    stats = await context.engine.stats()
    return stats.num_waiting >= context.settings.engine.scheduler.max_waiting


@open_router.get("/health/timed", PUBLIC)
@open_router.get("/health/timed{suffix}", PUBLIC)
async def timed_health(request: Request) -> Response:
    """200 if the step loop answers within N seconds: ``/health/timed-N``; 600 without a number."""
    context = context_of(request)
    suffix: str = request.path_params.get("suffix", "")
    found = _TIMED.fullmatch(suffix)
    limit_s = int(found[1]) if found else DEFAULT_TIMED_S
    if (suffix and not found) or limit_s > MAX_TIMED_S:
        message = f"the path is /health/timed-N with N from 1 to {MAX_TIMED_S}"
        return json_response({"error": message, "error_type": "Input Validation Error"}, 422)
    if context.engine.failure is not None:
        return json_response({"status": "unhealthy", "reason": context.engine.failure}, 503)
    try:
        async with asyncio.timeout(limit_s):
            await context.engine.stats()
    except TimeoutError:
        reason = f"the step loop doesn't answer within {limit_s} s"
        return json_response({"status": "unhealthy", "reason": reason}, 503)
    return json_response({"status": "healthy"})


@router.get("/v2/models/{model}/getSlotCount", SUMS)
async def slot_count(request: Request) -> Response:
    """How many requests may run at once, how many more may, and the tokens that fit."""
    context = context_of(request)
    name: str = request.path_params["model"]
    if name not in served_names(context.engine):
        raise UnknownModel(f"Model {name[:256]} not found.", param="model")
    stats = await context.engine.stats()
    slots = context.settings.engine.scheduler.seats
    return json_response(
        {
            "total_slots": slots,
            "free_slots": max(0, slots - stats.num_running),
            "available_tokens_length": _available_blocks(stats) * context.settings.engine.cache.block_size,
        }
    )


def _available_blocks(stats: EngineStats) -> int:
    """Return the blocks that a new request could get: free, or in the index where they can be evicted.

    Blocks that running requests pin in the index are counted too: an upper bound.
    """
    return min(stats.num_blocks, stats.num_free_blocks + stats.num_cached_blocks)


@router.get("/v1/config", TENANT)
async def config(request: Request) -> Response:
    """Sizes of the model as it is served."""
    context = context_of(request)
    settings = context.settings.engine
    kv, host = settings.cache.kv_cache_memory, settings.tiers.host_cache
    return json_response(
        {
            "modelName": context.engine.model_name,
            "maxSeqLen": context.engine.max_model_len,
            "npuMemSize": -1 if kv is None else kv // 2**30,
            "cpuMemSize": 0 if host is None else host // 2**30,
            "worldSize": 1,
            "maxOutputLen": context.settings.requests.max_output_tokens or context.engine.max_model_len,
            "cacheBlockSize": settings.cache.block_size,
        }
    )


@router.get("/v1/status", SUMS)
@router.get("/v2/status", SUMS)
async def status(request: Request) -> Response:
    """Role, requests and blocks."""
    context = context_of(request)
    stats = await context.engine.stats()
    slots = context.settings.engine.scheduler.seats
    host = None if stats.transfer is None else stats.transfer.tiers.get(Tier.HOST)
    total = 0 if host is None else host.capacity_blocks or 0
    used = 0 if host is None else host.num_blocks or 0
    return json_response(
        {
            "service": {
                "roleStatus": "RoleUnknown" if context.lifecycle.draining else "RoleReady",
                "currentRole": context.settings.engine.role,
            },
            "resource": {
                "availSlotsNum": max(0, slots - stats.num_running),
                "availBlockNum": _available_blocks(stats),
                "waitingRequestNum": stats.num_waiting,
                "runningRequestNum": stats.num_running,
                "swappedRequestNum": 0,
                "freeNpuBlockNums": stats.num_free_blocks,
                "totalNpuBlockNums": stats.num_blocks,
                "freeCpuBlockNums": total - used,
                "totalCpuBlockNums": total,
            },
            "linkStatus": {"peers": []},
        }
    )


@router.get("/metrics-json", SUMS)
async def metrics_json(request: Request) -> Response:
    """Mean times in ms, requests and blocks, as MindIE's coordinator reads them."""
    context = context_of(request)
    stats = await context.engine.stats()
    server = request.scope.get("server") or ("", 0)
    instance = f"{server[0]}:{server[1]}"
    values: dict[str, float | int] = {
        "TTFT": context.instruments.metrics.mean_ms("time_to_first_token_seconds"),
        "TBT": context.instruments.metrics.mean_ms("time_per_output_token_seconds"),
        "waitingInferRequestNum": stats.num_waiting,
        "processingInferRequestNum": stats.num_running,
        "remainBlocks": _available_blocks(stats),
    }
    result: list[dict[str, Any]] = [
        {"metric": [{"__name__": name, "job": "node", "instance": instance}], "value": str(value)}
        for name, value in values.items()
    ]
    return json_response({"resultType": "vector", "result": result})


@stop_router.get("/stopService", OPERATOR, has_head=False)
async def stop_service(request: Request) -> Response:
    """Drain and stop, as SIGTERM does; ``?mode=Force`` gives running requests 5 s."""
    if request.headers.get("sec-fetch-site", "none") != "none":
        raise Forbidden("a web page may not stop this server")
    mode = request.query_params.get("mode", "")
    if mode not in ("", "Force"):
        raise InvalidRequest("mode must be Force or absent", param="mode")
    stop = context_of(request).lifecycle.stop
    if stop is None:
        raise InvalidRequest("this server can't be stopped over HTTP; stop it where it was started")
    stop(FORCED_DRAIN_S if mode else None)
    return json_response({"message": "Service is stopping"})
