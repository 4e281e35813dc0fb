"""MindIE's fault handling and roles: what its controller sends to an engine's management plane.

A fault is handled in three commands: pause, set the devices up again, start. Here a pause is one between two
steps: requests wait and keep their blocks, so that none is lost; there is no device to set up. The role of a
server is fixed when it starts (``--role``), since both sides meet in a pool and not by links between devices.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import InvalidRequest
from stemma.server.errors import json_response, openai_error, tgi_error
from stemma.server.lifecycle import Maintenance
from stemma.server.openapi import takes
from stemma.server.operator.context import OperatorContext, context_of
from stemma.server.routes import OPERATOR, TENANT, Router
from stemma.server.turn.body import read_object

router = Router(tgi_error)
command_router = Router(openai_error, other_shapes=(tgi_error,))

STATUS_READY, STATUS_NORMAL, STATUS_ABNORMAL, STATUS_PAUSED = 0, 1, 2, 3
"""The original's numbers; 4, while it starts, is never seen: nothing listens before."""
_STATUS_OF: dict[Maintenance | None, int] = {
    None: STATUS_NORMAL,
    "paused": STATUS_PAUSED,
    "ready": STATUS_READY,
}
PAUSE, REINIT, START, PAUSE_ROCE = 0, 1, 2, 3
_ROLE_OF = {"prefill": "prefill", "decode": "decode", "flex": "both"}
_MAX_PEERS = 4096


class FaultCommand(BaseModel):
    """Body of a command."""

    cmd: Annotated[int, Field(strict=True)]


def _ipv4(value: Any) -> Any:
    if isinstance(value, str):
        ipaddress.IPv4Address(value)
    return value


_Ip = Annotated[str, BeforeValidator(_ipv4)]
_Number = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]


class RoleDevice(BaseModel):
    """A device of a node."""

    device_logical_id: _Number
    device_id: _Number
    device_ip: _Ip
    rank_id: _Number | None = None


class RoleNode(BaseModel):
    """A node of one side."""

    server_ip: _Ip
    device: Annotated[list[RoleDevice], Field(max_length=_MAX_PEERS)]
    id: Annotated[int, Field(ge=0)] | None = None
    host_ip: _Ip | None = None
    p_percentage: Annotated[int, Field(ge=0, le=100)] | None = None


class RolesV1(BaseModel):
    """Body of ``/v1/role``: this node and those of the other side."""

    local: RoleNode
    peers: Annotated[list[RoleNode], Field(max_length=_MAX_PEERS)] | None = None


class RoleInstance(BaseModel):
    """Devices that serve together."""

    dp_inst_id: Annotated[int, Field(ge=0)]
    device: Annotated[list[RoleDevice], Field(max_length=_MAX_PEERS)]


class RoleNodeV2(BaseModel):
    """A node with several such groups."""

    server_ip: _Ip
    host_ip: _Ip
    dp_inst_list: Annotated[list[RoleInstance], Field(max_length=_MAX_PEERS)]


class RolesV2(BaseModel):
    """Body of ``/v2/role``."""

    local: Annotated[list[RoleNodeV2], Field(max_length=_MAX_PEERS)]
    peers: Annotated[list[list[RoleNodeV2]], Field(max_length=_MAX_PEERS)] | None = None


@router.get("/v1/engine-server/running-status", TENANT)
async def running_status(request: Request) -> Response:
    """Whether the engine runs, as the original's number, and the failures."""
    context = context_of(request)
    failure = context.engine.failure
    if failure is None:
        return json_response({"status": _STATUS_OF[context.lifecycle.maintenance], "errors": []})
    error = {
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "errCode": "ENGINE_FAILED",
        "createdBy": "stemma",
        "message": failure,
    }
    return json_response({"status": STATUS_ABNORMAL, "errors": [error]})


@command_router.post("/v1/engine-server/fault-handling-command", OPERATOR, openapi_extra=takes(FaultCommand))
async def fault_handling_command(request: Request) -> Response:
    """Pause the engine, or start it again: ``{"cmd": 0}`` pauses, 1 sets up again, 2 starts, 3 pauses."""
    try:
        command = FaultCommand.model_validate(await read_object(request)).cmd
    except (InvalidRequest, ValidationError):
        return _error(422, "cmd must be necessary and data type must be integer.", "Input Validation Error")
    context = context_of(request)
    if not await _execute(context, command):
        return _error(400, "Command is not consistent with current status.", "Bad Request")
    reason = [{"device_id": 0, "result": True, "message": ""}]
    return json_response({"status": True, "message": "", "reason": reason})


async def _execute(context: OperatorContext, command: int) -> bool:
    """Follow a command; return False if the present state doesn't allow it."""
    if context.engine.failure is not None:
        return False
    state = context.lifecycle.maintenance
    if command in (PAUSE, PAUSE_ROCE) and state is None:
        context.lifecycle.maintenance = "paused"
        await context.engine.pause()
    elif command == REINIT and state == "paused":
        context.lifecycle.maintenance = "ready"
    elif command == START and state is not None:
        await context.engine.resume()
        context.lifecycle.maintenance = None
    else:
        return False
    return True


@command_router.post("/v1/role/{role}", OPERATOR, openapi_extra=takes(RolesV1))
async def role_v1(request: Request) -> Response:
    """Say whether the server has this role: prefill, decode or flex."""
    return await _role(request, RolesV1, ("prefill", "decode", "flex"))


@command_router.post("/v2/role/{role}", OPERATOR, openapi_extra=takes(RolesV2))
async def role_v2(request: Request) -> Response:
    """The same, with the later shape of the body; prefill or decode."""
    return await _role(request, RolesV2, ("prefill", "decode"))


async def _role(request: Request, shape: type[BaseModel], roles: tuple[str, ...]) -> Response:
    wanted: str = request.path_params["role"]
    if wanted not in roles:
        return _error(404, f"the role must be one of {', '.join(roles)}", "NotFoundError")
    try:
        shape.model_validate(await read_object(request))
    except (InvalidRequest, ValidationError) as error:
        why = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg']}"
        message = f"Req body converts to json fail. Reset to previous node status. ({why})"
        return _error(422, message, "Input validation error")
    role = context_of(request).settings.engine.role
    if role != _ROLE_OF[wanted]:
        message = (
            f"Update pd info failed. Reset to previous node status. (The role of this server is {role!r}, "
            f"fixed at its start: start it with --role {_ROLE_OF[wanted]}.)"
        )
        return _error(503, message, "Service Unavailable")
    return json_response({"result": "ok"})


def _error(status: int, message: str, kind: str) -> Response:
    return json_response({"error": message, "error_type": kind}, status)
