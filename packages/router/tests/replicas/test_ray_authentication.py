"""A Ray that asks for no token is refused, by what it says itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from packages.router.tests.replicas.cluster import wait_for
from tests.memory.tiers.pool.servers import free_port

from stemma.errors import ConfigError
from stemma.model.files.tiny import write_tiny_model

pytest.importorskip("ray", reason="the extra `ray` isn't installed")
pytest.importorskip("zmq", reason="the extra `ray` isn't installed")
grpc = pytest.importorskip("grpc", reason="the extra `ray` isn't installed")


@contextmanager
def control_service(status: object) -> Iterator[str]:
    """A server that answers every call with `status`; None: with an empty answer."""

    def answer(request: bytes, context: Any) -> bytes:
        if status is not None:
            context.abort(status, "InvalidAuthToken")
        return b""

    class AnyMethod(grpc.GenericRpcHandler):  # type: ignore[misc,name-defined]
        def service(self, details: object) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([AnyMethod()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_only_a_service_that_wants_a_token_is_used() -> None:
    from stemma_router.replicas.authentication import check_authentication

    with control_service(grpc.StatusCode.UNAUTHENTICATED) as address:
        check_authentication(address)
    with control_service(None) as address, pytest.raises(ConfigError, match=r"no token.*--insecure"):
        check_authentication(address)
    with control_service(grpc.StatusCode.UNAVAILABLE) as address, pytest.raises(ConfigError, match="UNAVAIL"):
        check_authentication(address)


def test_an_environment_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from stemma_router.replicas import send_rays_token

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="--insecure"):
        send_rays_token()
    monkeypatch.delenv("RAY_AUTH_MODE")
    send_rays_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.delenv("RAY_AUTH_MODE")


class RunningRay:
    """`ray start`, as an operator would, on loopback; with a token or without."""

    def __init__(self, folder: Path, token: str | None) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        local = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        self.environ = {**os.environ, **local, "HOME": str(folder)}
        mode = {"RAY_AUTH_MODE": "disabled"} if token is None else {"RAY_AUTH_MODE": "token"}
        if token is not None:
            mode["RAY_AUTH_TOKEN"] = token
        words = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        words += [f"--port={self.address.split(':')[1]}", f"--ray-client-server-port={free_port()}"]
        words += [f"--dashboard-agent-listen-port={free_port()}", "--object-store-memory=100000000"]
        self.log = folder / "ray.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).parent / "ray"), *words, f"--temp-dir={folder / 'r'}"],
                env=self.environ | mode,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> RunningRay:
        wait_for(lambda: "Ray runtime started" in self.log.read_text(), timeout_s=120)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)


def deployed(ray: RunningRay, folder: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `stemma cluster deploy` on a Ray that runs."""
    model = write_tiny_model(folder / "model")
    file = folder / "cluster.yaml"
    content = {
        "settings": {
            "model": {"path": str(model), "num_threads": 1},
            "cache": {"kv_cache_memory": "8MB"},
            "server": {"port": free_port()},
        },
        "replicas": {"count": 1, "num_ingress": 1, "ray": {"address": ray.address}},
    }
    file.write_text(json.dumps(content))
    command = [sys.executable, "-m", "stemma", "cluster", "deploy", str(file), *flags]
    given = {name: value for name, value in ray.environ.items() if not name.startswith("RAY_AUTH")} | environ
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_a_real_ray_without_a_token_is_refused_unless_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("r")  # short: Ray's sockets lie in it
    with RunningRay(folder, None) as ray:
        refused = deployed(ray, folder)
        assert refused.returncode != 0
        assert "asks for no token" in refused.stderr + refused.stdout
        insecure = deployed(ray, folder, "--insecure")
        assert "Ready:" in insecure.stdout, insecure.stderr


@pytest.mark.slow
def test_a_real_ray_with_a_token_is_used_by_who_has_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("r")
    with RunningRay(folder, "a" * 64) as ray:
        stranger = deployed(ray, folder)
        assert stranger.returncode != 0
        assert "no authentication token was found" in stranger.stderr + stranger.stdout
        wrong = deployed(ray, folder, RAY_AUTH_TOKEN="b" * 64)
        assert wrong.returncode != 0
        assert "Ready:" not in wrong.stdout
        ours = deployed(ray, folder, RAY_AUTH_TOKEN="a" * 64)
        assert "Ready:" in ours.stdout, ours.stderr
