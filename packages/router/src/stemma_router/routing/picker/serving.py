"""The gRPC server of an endpoint picker: Envoy's external processor, and gRPC's health checks."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stemma.errors import ConfigError
from stemma.server.door.ledger import shared
from stemma_router.routing.picker.endpoints import Endpoints
from stemma_router.routing.picker.exchange import Exchange
from stemma_router.routing.picker.options import PickerOptions
from stemma_router.routing.served_fleet import ServedFleet

_log = logging.getLogger(__name__)
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_READY = ("", "readiness", SERVICE)
_GRACE_S = 5.0
_AROUND_BYTES = 2**20
"""Headers and metadata of a message, beside a body."""


class Picker:
    """Answers Envoy for one fleet."""

    def __init__(self, served: ServedFleet, max_body_bytes: int, body_memory: int) -> None:
        self.num_requests = 0
        self._served = served
        self._endpoints = Endpoints()
        self._bodies = shared("picker_bytes", "bytes of bodies that Envoy sent", body_memory)
        self._max_body_bytes = max_body_bytes

    async def process(
        self, messages: AsyncIterator[ProcessingRequest], context: object
    ) -> AsyncIterator[ProcessingResponse]:
        """Answer the messages of one HTTP request."""
        self.num_requests += 1
        exchange = Exchange(self._served, self._endpoints, self._bodies, self._max_body_bytes)
        try:
            async for message in messages:
                async for answer in exchange.answers(message):
                    yield answer
        finally:
            exchange.close()


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """gRPC's health protocol, with the services that the endpoint picker protocol names."""

    def __init__(self, served: ServedFleet) -> None:
        self._served = served

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Say whether a service takes requests."""
        states = health_pb2.HealthCheckResponse
        if request.service == "liveness":
            return states(status=states.SERVING)
        if request.service not in _READY:
            return states(status=states.SERVICE_UNKNOWN)
        return states(status=states.SERVING if self._served.fleet.is_up else states.NOT_SERVING)


@asynccontextmanager
async def serving_picker(
    served: ServedFleet, options: PickerOptions, max_body_bytes: int, body_memory: int
) -> AsyncIterator[int]:
    """Listen meanwhile; yield the port. Raises ConfigError."""
    picker = Picker(served, max_body_bytes, body_memory)
    # Envoy sends a whole body in one message; gRPC takes 4 MiB unless it is told otherwise.
    limits = [("grpc.max_receive_message_length", max_body_bytes + _AROUND_BYTES)]
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *limits])
    handler = grpc.stream_stream_rpc_method_handler(
        picker.process,
        request_deserializer=ProcessingRequest.parse,
        response_serializer=bytes,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    health_pb2_grpc.add_HealthServicer_to_server(_Health(served), server)
    try:
        port = _listen(server, options)
    except RuntimeError as error:
        raise ConfigError(f"the endpoint picker can't listen on {options.address}: {error}") from error
    await server.start()
    try:
        yield port
    finally:
        await server.stop(_GRACE_S)


def _listen(server: grpc.aio.Server, options: PickerOptions) -> int:
    """Open the port, and return its number."""
    port: int
    if options.cert is None or options.key is None:
        port = server.add_insecure_port(options.address)
        return port
    try:
        pair = (options.key.read_bytes(), options.cert.read_bytes())
    except OSError as error:
        raise ConfigError(f"the endpoint picker's certificate can't be read: {error}") from error
    port = server.add_secure_port(options.address, grpc.ssl_server_credentials([pair]))
    return port
