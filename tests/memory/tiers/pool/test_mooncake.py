"""The Mooncake backend against a real mooncake_master, over TCP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.contracts.pool_backend_suite import PoolBackendContract, name_of, parts_of, read
from tests.memory.tiers.pool.servers import MooncakeMaster, free_port

from stemma.errors import ConfigError, StorageError
from stemma.memory.tiers.block_store import PutResult, ReadResult
from stemma.memory.tiers.pool.backend import PoolBackend
from stemma.memory.tiers.pool.mooncake import only_there
from stemma.memory.tiers.pool.registry import open_pool_backend, read_pool_config

"""Mooncake's code."""


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster()
    yield master
    master.stop()


@pytest.fixture(scope="module")
def client(master: MooncakeMaster) -> Iterator[PoolBackend]:
    """A client of its own for this module: its segment holds the values."""
    client = open_pool_backend("mooncake", master.config())
    yield client
    client.close()


class TestMooncakeContract(PoolBackendContract):
    @pytest.fixture(autouse=True)
    def _servers(self, master: MooncakeMaster, client: PoolBackend) -> None:
        self._config, self._client = master.config(0), client

    @pytest.fixture
    def backend(self) -> PoolBackend:
        # Closing a client takes a second, so one serves all tests that don't close it.
        return self._client

    def open(self) -> PoolBackend:
        return open_pool_backend("mooncake", self._config)


def test_registered_memory_is_read_and_written_in_place(client: PoolBackend) -> None:
    memory = np.zeros(4 << 20, dtype=np.uint8)
    client.register(memory.data)
    memory[: 1 << 20] = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)[: 1 << 20]
    header, block = memory.data[2 << 20 : (2 << 20) + 64], memory.data[: 1 << 20]
    name = name_of("in place")
    assert client.put_many([name], [(header, block)]) == [PutResult.STORED]
    into = memory.data[3 << 20 :]
    assert client.get_many([name], [(header, into)]) == [ReadResult.HIT]
    assert (memory[3 << 20 :] == memory[: 1 << 20]).all()


def test_a_full_segment_is_no_space_and_evicts(client: PoolBackend) -> None:
    megabyte = (memoryview(bytes(1 << 20)),)
    results = [client.put_many([name_of(f"fill {n}")], [megabyte])[0] for n in range(60)]
    assert set(results) <= {PutResult.STORED, PutResult.NO_SPACE}
    assert results.count(PutResult.STORED) >= 20


def test_the_configuration_is_a_mooncake_json(tmp_path: Path, master: MooncakeMaster) -> None:
    file = tmp_path / "mooncake.json"
    config = master.config() | {"global_segment_size": "16MiB", "device_name": "", "use_ascend_direct": True}
    file.write_text(json.dumps(config))
    pool = open_pool_backend("mooncake", read_pool_config(file))
    name = name_of("from json")
    pool.put_many([name], [parts_of(name)])
    assert read(pool, [name]) == [ReadResult.HIT]
    pool.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"local_hostname": None}, "local_hostname"),
        ({"protocol": "pigeon"}, "protocol"),
        ({"global_segment_size": "1MB"}, "global_segment_size"),
        ({"master": "x:1"}, "master"),
    ],
)
def test_configuration_errors(change: dict[str, object], named: str) -> None:
    good = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{free_port()}",
    }
    with pytest.raises(ConfigError, match=named):
        open_pool_backend("mooncake", good | change)


def test_no_master_is_an_error_at_once() -> None:
    """The client's own setup would hold Python's lock for 90 s."""
    with pytest.raises(StorageError, match="no master"):
        open_pool_backend(
            "mooncake",
            {
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"127.0.0.1:{free_port()}",
            },
        )


def test_a_value_that_another_server_only_began_to_put_does_not_count_as_there() -> None:
    """Its put may never end; then the value isn't there for as long as the master keeps the place."""
    results = [PutResult.EXISTS, PutResult.EXISTS, PutResult.STORED]
    found = only_there(results, [0, 1], [False, True])
    assert found == [PutResult.DROPPED, PutResult.EXISTS, PutResult.STORED]
