"""The Redis backend against a real redis-server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contracts.pool_backend_suite import PoolBackendContract, name_of, parts_of, read
from tests.memory.tiers.pool.servers import RedisServer, free_port

from stemma.errors import ConfigError, StorageError
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.pool.redis import RedisPool, open_backend


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


class TestRedisContract(PoolBackendContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer) -> None:
        self._url = server.url

    def open(self) -> RedisPool:
        return open_backend({"url": self._url})


def test_a_full_server_is_no_space(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    try:
        pool = open_backend({"url": server.url})
        big = (memoryview(bytes(1 << 20)),)
        results = [pool.put_many([name_of(n)], [big])[0] for n in range(10)]
        assert results[0] is PutResult.STORED
        assert results[-1] is PutResult.NO_SPACE
    finally:
        server.stop()


def test_a_value_of_another_type_is_a_miss(server: RedisServer) -> None:
    import redis

    name = name_of("list")
    redis.Redis.from_url(server.url).lpush(f"stemma:{name}", "x")
    assert read(open_backend({"url": server.url}), [name]) == [ReadResult.MISS]


def test_values_expire(server: RedisServer) -> None:
    import redis

    name = name_of("expires")
    open_backend({"url": server.url, "ttl_s": 60}).put_many([name], [parts_of(name)])
    assert 0 < int(redis.Redis.from_url(server.url).ttl(f"stemma:{name}")) <= 60


def test_nobody_listens() -> None:
    with pytest.raises(StorageError):
        open_backend({"url": f"redis://127.0.0.1:{free_port()}/0"})


def test_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="url"):
        open_backend({"url": "http://x"})
    with pytest.raises(ConfigError, match="host"):
        open_backend({"host": "x"})
