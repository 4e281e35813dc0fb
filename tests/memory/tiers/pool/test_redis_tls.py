"""The Redis backend over TLS, against a real redis-server that asks for certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import make_certificate
from tests.contracts.pool_backend_suite import PoolBackendContract
from tests.memory.tiers.pool.servers import RedisServer, free_port

from stemma.errors import StorageError
from stemma.memory.tiers.pool.redis import RedisPool, open_backend


class TlsRedis:
    """A server whose one certificate is its own, its authority's and its clients'."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key = make_certificate(folder)
        self.port = free_port()
        files = ["--tls-cert-file", self.cert, "--tls-key-file", self.key, "--tls-ca-cert-file", self.cert]
        options = ["--tls-port", str(self.port), *map(str, files)]
        self.server = RedisServer(folder, *options)
        self.url = f"rediss://localhost:{self.port}/0"
        self.trusting = f"{self.url}?ssl_ca_certs={self.cert}"
        self.whole = f"{self.trusting}&ssl_certfile={self.cert}&ssl_keyfile={self.key}"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRedis]:
    made = TlsRedis(tmp_path_factory.mktemp("redis"))
    yield made
    made.server.stop()


class TestRedisTlsContract(PoolBackendContract):
    @pytest.fixture(autouse=True)
    def _server(self, tls: TlsRedis) -> None:
        self._url = tls.whole

    def open(self) -> RedisPool:
        return open_backend({"url": self._url})


def test_an_unknown_authority_is_refused(tls: TlsRedis) -> None:
    with pytest.raises(StorageError, match="certificate verify failed"):
        open_backend({"url": tls.url})


def test_another_name_is_refused(tls: TlsRedis) -> None:
    with pytest.raises(StorageError, match="certificate verify failed"):
        open_backend({"url": tls.whole.replace("localhost", "127.0.0.1")})


def test_a_client_without_a_certificate_is_refused(tls: TlsRedis) -> None:
    with pytest.raises(StorageError):
        open_backend({"url": tls.trusting})


def test_clear_text_is_refused(tls: TlsRedis) -> None:
    with pytest.raises(StorageError):
        open_backend({"url": f"redis://localhost:{tls.port}/0"})
