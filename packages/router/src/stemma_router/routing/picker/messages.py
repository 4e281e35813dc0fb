"""Envoy's external processing messages, as far as an endpoint picker reads and writes them.

The protocol is that of the Gateway API Inference Extension's endpoint pickers, version 1.0.0: the choice
stands in a header and in dynamic metadata, `IP:PORT` of the best server and of those to try next, separated
by commas.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import orjson
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, HeaderValueOption
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingMode,
    ProcessingModeBodySendMode,
)
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import ListValue, Struct, Value

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
_TRY_LIMIT = "x-envoy-upstream-rq-per-try-timeout-ms"
"""Envoy heeds it until an answer begins, where its configuration lets the picker set it."""
_SUBSET = "x-gateway-destination-endpoint-subset"
_NAMESPACE = "envoy.lb"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
FULL_DUPLEX = ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
BUFFERED = ProcessingModeBodySendMode.BUFFERED
_PIECE_BYTES = 60_000
"""Bytes of a piece of a body that goes back: Envoy takes 64 KB at once."""


def headers_of(headers: HeaderMap | None) -> dict[str, str]:
    """Return headers by name, lower case; of several with one name the last."""
    given = [] if headers is None else headers.headers
    return {one.key.lower(): one.raw_value.decode("latin-1") if one.raw_value else one.value for one in given}


def subset_of(message: ProcessingRequest) -> list[str] | None:
    """Return the endpoints that the picker must choose from; None: any."""
    value = _metadata(message, _SUBSET_NAMESPACE, _SUBSET)
    if isinstance(value, str):
        return [one.strip() for one in value.split(",") if one.strip()]
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else None


def served_by(message: ProcessingRequest) -> str | None:
    """Return the endpoint that answered; None: Envoy doesn't say."""
    value = _metadata(message, _NAMESPACE, SERVED)
    return value if isinstance(value, str) else None


def picked(endpoints: Sequence[str], *, at_headers: bool, limit_s: float | None = None) -> ProcessingResponse:
    """Return the choice: the answer to a request's headers, or to its whole body.

    `limit_s`: after this time without an answer Envoy asks the next endpoint; None: its own configuration
    says when. What the client says of it is dropped.
    """
    text = ",".join(endpoints)
    headers = {DESTINATION: text}
    if limit_s is not None:
        headers[_TRY_LIMIT] = str(round(1000 * limit_s))
    options = [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()))
        for name, value in headers.items()
    ]
    dropped = [] if limit_s is not None else [_TRY_LIMIT]
    mutation = HeaderMutation(set_headers=options, remove_headers=dropped)
    common = CommonResponse(header_mutation=mutation, clear_route_cache=True)
    chosen = Struct(fields={DESTINATION: Value(string_value=text)})
    metadata = Struct(fields={_NAMESPACE: Value(struct_value=chosen)})
    if at_headers:
        return ProcessingResponse(request_headers=HeadersResponse(response=common), dynamic_metadata=metadata)
    return ProcessingResponse(request_body=BodyResponse(response=common), dynamic_metadata=metadata)


def body_pieces(content: bytes, *, of_request: bool, is_last: bool) -> list[ProcessingResponse]:
    """Return a body that was held back, in pieces as it goes on."""
    starts = range(0, max(1, len(content)), _PIECE_BYTES)
    return [
        _body(
            CommonResponse(
                body_mutation=BodyMutation(
                    streamed_response=StreamedBodyResponse(
                        body=content[start : start + _PIECE_BYTES],
                        end_of_stream=is_last and start + _PIECE_BYTES >= len(content),
                    )
                )
            ),
            of_request=of_request,
        )
        for start in starts
    ]


def go_on(
    message: ProcessingRequest, *, pass_bodies: bool, wants_answer: bool = False
) -> list[ProcessingResponse]:
    """Return the answers to a message that needs nothing; `pass_bodies`: Envoy wants bodies back.

    `wants_answer`: ask for the answer's body too, as far as Envoy's buffer goes, where its configuration lets
    the picker ask (`allow_mode_override`).
    """
    if message.request_headers is not None:
        return [ProcessingResponse(request_headers=HeadersResponse(response=CommonResponse()))]
    if message.response_headers is not None:
        told = HeadersResponse(response=CommonResponse())
        mode = ProcessingMode(response_body_mode=ProcessingModeBodySendMode.BUFFERED_PARTIAL)
        return [ProcessingResponse(response_headers=told, mode_override=mode if wants_answer else None)]
    if message.request_trailers is not None:
        return [ProcessingResponse(request_trailers=TrailersResponse())]
    if message.response_trailers is not None:
        return [ProcessingResponse(response_trailers=TrailersResponse())]
    of_request = message.request_body is not None
    body = message.request_body if message.request_body is not None else message.response_body
    if body is not None and pass_bodies:
        return body_pieces(body.body, of_request=of_request, is_last=body.end_of_stream)
    return [_body(CommonResponse(), of_request=of_request)]


def more_time(seconds: float) -> ProcessingResponse:
    """Return the answer that keeps Envoy waiting for the real one."""
    return ProcessingResponse(override_message_timeout=timedelta(seconds=seconds))


def refused(status: int, message: str, retry_after_s: int | None = None) -> ProcessingResponse:
    """Return an answer of Envoy's own, in OpenAI's shape."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    headers = {"content-type": "application/json"}
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    options = [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()))
        for name, value in headers.items()
    ]
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=StatusCode(status)),
            headers=HeaderMutation(set_headers=options),
            body=orjson.dumps({"error": {"message": message, "type": kind}}),
        )
    )


def _body(common: CommonResponse, *, of_request: bool) -> ProcessingResponse:
    answer = BodyResponse(response=common)
    return ProcessingResponse(request_body=answer) if of_request else ProcessingResponse(response_body=answer)


def _metadata(message: ProcessingRequest, namespace: str, name: str) -> Any:
    context = message.metadata_context
    found = None if context is None else context.filter_metadata.get(namespace)
    return None if found is None else _plain(found.fields.get(name))


def _plain(value: Value | None) -> Any:
    if value is None:
        return None
    if isinstance(value.list_value, ListValue):
        return [_plain(one) for one in value.list_value.values]
    return value.string_value
