"""Triton's binary tensors: bytes behind the JSON of a request or an answer.

The header ``Inference-Header-Content-Length`` says where the JSON ends. Behind it come the tensors that have
``binary_data_size`` among their parameters, in order, as little-endian integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import InvalidRequest
from stemma.server.turn.body import object_of, read_bytes

BINARY_HEADER = "inference-header-content-length"
_MAX_DIGITS = 12
_DTYPES = {"UINT32": "<u4", "INT32": "<i4", "INT64": "<i8", "UINT64": "<u8"}


async def read_infer(request: Request, max_values: int) -> dict[str, Any]:
    """Return the body of an infer request with its binary tensors as ``data``.

    A tensor may have `max_values` values. Raises InvalidRequest for sizes that don't fit.
    """
    whole = await read_bytes(request)
    given = request.headers.get(BINARY_HEADER)
    if given is None:
        return await object_of(request, whole)
    if not (given.isascii() and given.isdecimal() and len(given) <= _MAX_DIGITS and int(given) <= len(whole)):
        raise InvalidRequest(f"{BINARY_HEADER}: {given[:32]!r} is no length within the body")
    body = await object_of(request, whole[: int(given)])
    rest = memoryview(whole)[int(given) :]
    inputs = body.get("inputs")
    for number, tensor in enumerate(inputs if isinstance(inputs, list) else ()):
        parameters = tensor.get("parameters") if isinstance(tensor, dict) else None
        if not isinstance(parameters, dict) or "binary_data_size" not in parameters:
            continue
        where = f"inputs[{number}].parameters.binary_data_size"
        size = parameters.pop("binary_data_size")
        if type(size) is not int or not 0 <= size <= len(rest):
            raise InvalidRequest(f"{where} is no length within the body", param=where)
        tensor["data"] = _values(rest[:size], tensor.get("datatype"), where, max_values)
        rest = rest[size:]
        if not parameters:
            del tensor["parameters"]
    if len(rest):
        raise InvalidRequest(f"{len(rest)} bytes are left behind the last tensor", param="inputs")
    return body


def _values(data: memoryview, datatype: Any, where: str, max_values: int) -> list[int]:
    dtype = _DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise InvalidRequest(f"a binary tensor is one of {', '.join(_DTYPES)}", param="inputs")
    width = np.dtype(dtype).itemsize
    if len(data) % width or len(data) > max_values * width:
        raise InvalidRequest(
            f"{where}: {len(data)} bytes are no {datatype} values, or more than {max_values}", param=where
        )
    values: list[int] = np.frombuffer(data, dtype=dtype).tolist()
    return values


def binary_outputs(raw: dict[str, Any], num_outputs: int) -> list[bool]:
    """Return which outputs a request, as it came, wants as bytes."""
    parameters = raw.get("parameters")
    default = isinstance(parameters, dict) and parameters.get("binary_data_output") is True
    outputs = raw.get("outputs")
    if not isinstance(outputs, list) or not outputs:
        return [default] * num_outputs
    wanted = []
    for output in outputs:
        own = output.get("parameters") if isinstance(output, dict) else None
        chosen = own.get("binary_data", default) if isinstance(own, dict) else default
        wanted.append(chosen is True)
    return wanted


def infer_response(answer: dict[str, Any], is_binary: list[bool], headers: dict[str, str]) -> Response:
    """Return an answer, the UINT32 tensors marked in `is_binary` behind its JSON."""
    parts: list[bytes] = []
    for output, binary in zip(answer["outputs"], is_binary, strict=True):
        if binary:
            parts.append(np.array(output.pop("data"), dtype="<u4").tobytes())
            output["parameters"] = {"binary_data_size": len(parts[-1])}
    head = orjson.dumps(answer)
    if not parts:
        return Response(head, headers=headers, media_type="application/json")
    headers = {**headers, "Inference-Header-Content-Length": str(len(head))}
    return Response(b"".join([head, *parts]), headers=headers, media_type="application/octet-stream")
