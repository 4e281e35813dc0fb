"""Pool on an existing Redis or Valkey server: one string per value.

Set ``maxmemory`` and ``maxmemory-policy allkeys-lru`` on the server: it then evicts by itself. Under
``noeviction`` a full server answers OOM, which is NO_SPACE here. The server's single thread copies each value
several times: on 2 cores its throughput was two thirds of Mooncake's over TCP (docs/project/log.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import Field

from stemma.errors import ConfigError, StorageError
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.pool.backend import Parts, PoolBackend, part_bytes
from stemma.memory.tiers.pool.registry import PoolConfig

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:
    raise ConfigError("pool redis needs the redis package: pip install 'stemma-llm[redis]'") from error


class RedisConfig(PoolConfig):
    """``--pool redis``: what its configuration file may say."""

    url: str = "redis://127.0.0.1:6379/0"
    """``redis://``, ``rediss://`` (TLS) or ``unix://``; user and password may be part of it."""
    prefix: str = Field(default="stemma:", max_length=100)
    """Prefix of each key."""
    ttl_s: float | None = Field(default=None, ge=1)
    """Seconds after which a value expires, counted from its put."""
    connect_timeout_s: float = Field(default=0.5, gt=0)
    socket_timeout_s: float = Field(default=1.0, gt=0)


def open_backend(config: Mapping[str, Any]) -> RedisPool:
    """Connect. Raises ConfigError for a bad URL and StorageError if the server doesn't answer a PING."""
    return RedisPool(RedisConfig.parse(config, pool="redis"))


class RedisPool(PoolBackend):
    """A thin layer over redis-py; the client's connection pool makes it thread-safe."""

    def __init__(self, config: RedisConfig) -> None:
        self._prefix = config.prefix
        self._ttl_s = None if config.ttl_s is None else int(config.ttl_s)
        try:
            # No retries inside the client: the circuit breaker decides when to try again.
            self._client = redis.Redis.from_url(
                config.url,
                socket_connect_timeout=config.connect_timeout_s,
                socket_timeout=config.socket_timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ConfigError(f"pool redis: url: {error}") from error
        try:
            self._client.ping()
        except redis.RedisError as error:
            self._client.close()
            raise StorageError(f"pool redis: {error}") from error
        self._closed = False

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """One pipeline of EXISTS."""
        return [answer == 1 for answer in self._pipeline([("EXISTS", self._prefix + key) for key in keys])]

    def get_many(self, keys: Sequence[str], into: Sequence[Parts]) -> list[ReadResult]:
        """One MGET, and one copy of each value."""
        if not keys:
            return []
        (values,) = self._pipeline([("MGET", *(self._prefix + key for key in keys))])
        if isinstance(values, redis.RedisError):
            raise StorageError(f"pool redis: {values}") from values
        return [
            _fill(value, parts) for value, parts in zip(cast(list[bytes | None], values), into, strict=True)
        ]

    def put_many(self, keys: Sequence[str], values: Sequence[Parts]) -> list[PutResult]:
        """One pipeline of SET NX."""
        expiry = () if self._ttl_s is None else ("EX", self._ttl_s)
        commands = [
            ("SET", self._prefix + key, parts[0] if len(parts) == 1 else b"".join(parts), "NX", *expiry)
            for key, parts in zip(keys, values, strict=True)
        ]
        return [_put_result(answer) for answer in self._pipeline(commands)]

    def remove(self, keys: Sequence[str]) -> int:
        """One UNLINK: the server frees the memory in a thread of its own."""
        if not keys:
            return 0
        (num_removed,) = self._pipeline([("UNLINK", *(self._prefix + key for key in keys))])
        return num_removed if isinstance(num_removed, int) else 0

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._client.close()

    def _pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Run commands in one round trip; an error answer takes the place of its result."""
        if self._closed:
            raise StorageError("the redis pool is closed")
        pipeline: Any = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            answers: list[Any] = pipeline.execute(raise_on_error=False)
            return answers
        except (redis.RedisError, OSError) as error:
            raise StorageError(f"pool redis: {error}") from error


def _fill(value: bytes | None, parts: Parts) -> ReadResult:
    if value is None:
        return ReadResult.MISS
    if len(value) > part_bytes(parts):
        return ReadResult.CORRUPT
    source, offset = memoryview(value), 0
    for part in parts:
        found = source[offset : offset + part.nbytes]
        part[: found.nbytes] = found
        offset += part.nbytes
    return ReadResult.HIT


def _put_result(answer: object) -> PutResult:
    if isinstance(answer, redis.RedisError):
        return (
            PutResult.NO_SPACE if str(answer).startswith(("OOM", "command not allowed")) else PutResult.ERROR
        )
    # SET NX answers nil where the key exists.
    return PutResult.EXISTS if answer is None else PutResult.STORED
