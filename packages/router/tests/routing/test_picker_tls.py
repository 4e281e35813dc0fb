"""The endpoint picker behind TLS, as gateways with InferencePools call it."""

from __future__ import annotations

from pathlib import Path

import pytest
from packages.router.tests.routing.processes import router, sick_server
from tests.certificates import make_certificate

from stemma.errors import ConfigError
from stemma_router.routing.fleet import create_fleet_app
from stemma_router.routing.picker.options import PickerOptions
from stemma_router.routing.server_list import ServerList

pytest.importorskip("envoy_data_plane", reason="the extra `envoy` isn't installed")
pytest.importorskip("grpc_health", reason="the extra `envoy` isn't installed")


async def test_the_picker_speaks_tls(tmp_path: Path) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from tests.ports import free_port, wait_for

    cert, key = make_certificate(tmp_path)
    port, server = free_port(), sick_server()
    flags = (f"--endpoint-picker=127.0.0.1:{port}", f"--endpoint-picker-cert={cert}")
    proxy = router(server.url, flags=(*flags, f"--endpoint-picker-key={key}"))
    try:
        wait_for(port)
        trusted = grpc.ssl_channel_credentials(cert.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{port}", trusted) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3)
    finally:
        proxy.stop()
        server.stop()


def test_what_a_picker_needs() -> None:
    with pytest.raises(ConfigError, match="go together"):
        PickerOptions("127.0.0.1:0", cert=Path("cert.pem"))
    with pytest.raises(ConfigError, match=r"dns\+http"):
        create_fleet_app(ServerList(["http://host:1"]), endpoint_picker=PickerOptions("127.0.0.1:0"))
