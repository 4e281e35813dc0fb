"""Pool on Mooncake Store: DRAM of many machines under one master, over TCP or RDMA.

Configured by the same ``mooncake.json`` that MindIE, vLLM and SGLang read. What the client does when things
break was measured (docs/project/log.md) and shapes this file:

* Every negative code is a miss of some kind; ``-900`` for all keys means that the master is gone.
* When the client that held a value dies, the master still lists its copy for about 12 s. A get then fails
  with ``-800``, and a put is acknowledged without being written. Removing the key by force ends this at once,
  so we do it on the first failed transfer.
* A put of an existing key also returns 0, so `put_many` asks first. That leases only keys that exist.
* Transfers release Python's lock; **`setup` and `close` hold it**, for 90 s and 18 s while the master is
  down. So we first check whether the master's port answers, and postpone a close until it does.

The client logs to stderr through glog; only errors are shown, unless ``GLOG_minloglevel`` is set.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field, field_validator

from stemma.config.sizes import ByteSize
from stemma.errors import ConfigError, StorageError
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.pool.backend import Parts, PoolBackend, part_bytes
from stemma.memory.tiers.pool.registered import address_of
from stemma.memory.tiers.pool.registry import PoolConfig
from stemma.supervision import LoggingSupervisor, start_thread

_log = logging.getLogger(__name__)

_OK = 0
_NO_AVAILABLE_HANDLE = -200
_INVALID_PARAMS = -600
_REPLICA_IS_NOT_READY = -703
_OBJECT_NOT_FOUND = -704
_OBJECT_ALREADY_EXISTS = -705
_LEASE_EXPIRED = -707
_TRANSFER_FAIL = -800
_RPC_FAIL = (-900, -901)
"""The master didn't answer: connection lost, or timed out."""

_MIN_SEGMENT_BYTES = 16 << 20
_KNOCK_TIMEOUT_S = 1.0
_CLOSE_RETRY_S = 5.0


class MooncakeConfig(PoolConfig):
    """``mooncake.json``."""

    local_hostname: str
    """This machine's host name or address, as other machines reach it."""
    metadata_server: str
    """``P2PHANDSHAKE``, or the address of a metadata server."""
    master_server_address: str
    """``host:port``, or ``etcd://...`` for masters in HA."""
    global_segment_size: ByteSize = Field(default=3355443200, ge=0)
    """DRAM that this process contributes to the pool; 0: it only uses that of others."""
    local_buffer_size: ByteSize = Field(default=1073741824, ge=0)
    """The client's own transfer buffer."""
    protocol: Literal["tcp", "rdma", "ascend"] = "tcp"
    device_name: str = ""
    """RDMA devices, separated by commas; empty: the client chooses."""
    use_ascend_direct: bool = False
    """Only with protocol ``ascend``."""

    @field_validator("global_segment_size")
    @classmethod
    def _not_tiny(cls, value: int) -> int:
        if 0 < value < _MIN_SEGMENT_BYTES:
            raise ValueError(
                f"must be 0 or at least {_MIN_SEGMENT_BYTES}: the client takes no smaller segment"
            )
        return value


def open_backend(config: Mapping[str, Any]) -> MooncakePool:
    """Join the pool. Raises ConfigError, or StorageError if the master doesn't answer."""
    return MooncakePool(MooncakeConfig.parse(config, pool="mooncake"))


class MooncakePool(PoolBackend):
    """One Mooncake client; its calls are thread-safe."""

    zero_copy = True

    def __init__(self, config: MooncakeConfig) -> None:
        self._master = config.master_server_address
        _set_environment(config)
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise ConfigError(
                f"pool mooncake: {error}; pip install 'stemma-llm[mooncake]', and Debian needs libibverbs1"
            ) from error
        if not _answers(self._master):
            raise StorageError(f"pool mooncake: no master answers at {self._master}")
        self._client = MooncakeDistributedStore()
        code = self._client.setup(
            config.local_hostname,
            config.metadata_server,
            config.global_segment_size,
            config.local_buffer_size,
            config.protocol,
            config.device_name,
            config.master_server_address,
        )
        if code != _OK:
            raise StorageError(f"pool mooncake: the client's setup failed with code {code}")
        self._replicate = ReplicateConfig()
        if config.global_segment_size:
            # Prefer our own segment: no network, and never a dead machine's memory. If full: any other.
            self._replicate.preferred_segment = self._client.get_hostname()
        self._registered: list[memoryview] = []
        """Kept until the client is closed, which ends their registration."""
        self._closed = False

    def register(self, memory: memoryview) -> None:
        """Register memory for transfers without a copy. Raises StorageError if the client refuses."""
        self._require_open()
        code = self._client.register_buffer(address_of(memory), memory.nbytes)
        if code != _OK:
            raise StorageError(f"pool mooncake: can't register {memory.nbytes} bytes, code {code}")
        self._registered.append(memory)

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """One call. A key that is found can't be evicted for the next 10 s (Mooncake's lease)."""
        self._require_open()
        codes = self._call(self._client.batch_is_exist, list(keys))
        return [code == 1 for code in codes]

    def get_many(self, keys: Sequence[str], into: Sequence[Parts]) -> list[ReadResult]:
        """One batch, written directly into the parts; keys whose holder is gone are removed."""
        self._require_open()
        if all(len(parts) == 1 for parts in into):
            pointers, sizes = [address_of(parts[0]) for parts in into], [parts[0].nbytes for parts in into]
            codes = self._call(self._client.batch_get_into, list(keys), pointers, sizes)
        else:
            codes = self._call(self._client.batch_get_into_multi_buffers, list(keys), *_scattered(into))
        failed = [key for key, code in zip(keys, codes, strict=True) if code == _TRANSFER_FAIL]
        if failed:
            self._client.batch_remove(failed, True)
        return [_read_result(code, part_bytes(parts)) for code, parts in zip(codes, into, strict=True)]

    def put_many(self, keys: Sequence[str], values: Sequence[Parts]) -> list[PutResult]:
        """One call to see which keys are there, one batch for the others."""
        present = self.exists_many(keys)
        results = [PutResult.EXISTS] * len(keys)
        absent = [index for index, there in enumerate(present) if not there]
        names = [keys[index] for index in absent]
        parts = [values[index] for index in absent]
        if all(len(value) == 1 for value in parts):
            pointers, sizes = [address_of(value[0]) for value in parts], [value[0].nbytes for value in parts]
            codes = self._call(self._client.batch_put_from, names, pointers, sizes, self._replicate)
        else:
            put = self._client.batch_put_from_multi_buffers
            codes = self._call(put, names, *_scattered(parts), self._replicate)
        for index, code in zip(absent, codes, strict=True):
            results[index] = _put_result(code)
        doubted = [index for index in absent if results[index] is PutResult.EXISTS]
        return only_there(results, doubted, self.exists_many([keys[index] for index in doubted]))

    def remove(self, keys: Sequence[str]) -> int:
        """One call; removes leased keys too.

        Whoever reads or writes such a value at that moment may access the memory of another value. The header
        in front of each value detects this.
        """
        self._require_open()
        return sum(code == _OK for code in self._call(self._client.batch_remove, list(keys), True))

    def close(self) -> None:
        """Leave the pool; the values that this process held are lost.

        The client holds Python's lock for 1 to 2 s here. If the master is down it would be 18 s, so the close
        is then postponed until the master answers again or the process ends.
        """
        if self._closed:
            return
        self._closed = True
        if _answers(self._master):
            self._client.close()
        else:
            _log.warning("mooncake master %s is away: its client is closed when it is back", self._master)
            rest = (self._client, self._master, self._registered)
            start_thread("stemma-mooncake-close", partial(_close_later, *rest), LoggingSupervisor())

    def _require_open(self) -> None:
        if self._closed:
            raise StorageError("the mooncake pool is closed")

    def _call(self, method: Any, keys: list[str], *arguments: Any) -> list[int]:
        """Return one code per key; raise StorageError if the master answered for none."""
        if not keys:
            return []
        codes: list[int] = method(keys, *arguments)
        if len(codes) != len(keys):
            raise StorageError(f"pool mooncake: {len(codes)} answers for {len(keys)} keys")
        if all(code in _RPC_FAIL for code in codes):
            raise StorageError(f"pool mooncake: the master at {self._master} doesn't answer")
        return codes


def _set_environment(config: MooncakeConfig) -> None:
    """Set what the native client reads only from the environment; existing values stay."""
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if config.protocol == "tcp":
        os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
        host = config.local_hostname.rsplit(":", 1)[0]
        if host.startswith("127."):
            # Without it the client listens on every interface, whatever its hostname.
            os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)


def _answers(master: str) -> bool:
    """Return whether something listens at ``host:port``; True for addresses of other forms."""
    host, _, port = master.rpartition(":")
    if "://" in master or not port.isdigit():
        return True
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_TIMEOUT_S):
            return True
    except OSError:
        return False


def _close_later(client: Any, master: str, registered: list[memoryview]) -> None:
    """Close the client once its master answers; keep the memory that it may write into until then."""
    while not _answers(master):
        time.sleep(_CLOSE_RETRY_S)
    client.close()
    registered.clear()


def _scattered(values: Sequence[Parts]) -> tuple[list[list[int]], list[list[int]]]:
    """Return addresses and sizes of all parts, as the multi-buffer calls take them."""
    return [[address_of(part) for part in parts] for parts in values], [
        [part.nbytes for part in parts] for parts in values
    ]


def _read_result(code: int, num_bytes: int) -> ReadResult:
    if code in (_OBJECT_NOT_FOUND, _REPLICA_IS_NOT_READY):
        return ReadResult.MISS
    if 0 < code <= num_bytes:
        return ReadResult.HIT
    if code == _LEASE_EXPIRED:
        # The transfer took longer than the master promised to keep the value (`default_kv_lease_ttl`).
        return ReadResult.LATE
    # Any other length, or parameters that can only be wrong because the value's length is another one.
    return ReadResult.CORRUPT if code >= 0 or code == _INVALID_PARAMS else ReadResult.ERROR


def _put_result(code: int) -> PutResult:
    if code == _OK:
        return PutResult.STORED
    if code == _OBJECT_ALREADY_EXISTS:
        return PutResult.EXISTS
    return PutResult.NO_SPACE if code == _NO_AVAILABLE_HANDLE else PutResult.ERROR


def only_there(
    results: Sequence[PutResult], doubted: Sequence[int], are_there: Sequence[bool]
) -> list[PutResult]:
    """Return results without the claim that values exist which others have only begun to put.

    Their put may never end; the master keeps the place for a while. `doubted`: the numbers of such values.
    """
    found = list(results)
    for index, is_there in zip(doubted, are_there, strict=True):
        if not is_there:
            found[index] = PutResult.DROPPED
    return found
