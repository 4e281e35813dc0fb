"""Pools: how much of a backend's own bandwidth the pool tier leaves over.

``python -m benchmarks.pool`` starts a Mooncake master and a Redis server on loopback, and a second process
that gives DRAM to Mooncake, so that each block crosses TCP. Blocks are 2 MB. Every figure of ours stands
beside a bare loop over the same objects in the same run, taken in turns:

* mooncake: `batch_get_into` / `batch_put_from` on registered memory, in the same batches as ours;
* redis: `mget` / a pipeline of `set`;
* directory: `os.read` / `os.write` of the same files (page cache warm).

"load to device" is what a server does: `TierTransfer.load`, with the copy into the (CPU) device's blocks;
"read of a load" is the pool's part of it, into slots that it lends.

Limit: mooncake, get, ours into registered memory >= 0.8 x bare.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from stemma.config.settings import PoolSettings
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.tiers.block_store import BlockPut, PutResult, ReadResult
from stemma.memory.tiers.pool.backend import PoolBackend
from stemma.memory.tiers.pool.envelope import HEADER_BYTES
from stemma.memory.tiers.pool.keys import PoolKeys
from stemma.memory.tiers.pool.pool_store import PoolStore
from stemma.memory.tiers.pool.reads import BATCH_BLOCKS
from stemma.memory.tiers.pool.registry import open_pool_backend
from stemma.memory.tiers.transfer import TierTransfer, TransferPolicy
from stemma.native.copying import copy_function
from stemma.types import BlockKey

BLOCK_BYTES = 2 * 2**20
NUM_BLOCKS = 64
LAYOUT = KVLayout(32, 2, 64, 2, 128, "bfloat16")
"""A block of it is BLOCK_BYTES."""
STAGING_BYTES = 128 * 2**20
NAMES = PoolKeys("bench")
LIMIT = 0.8


def new_keys() -> list[BlockKey]:
    return [BlockKey(os.urandom(32)) for _ in range(NUM_BLOCKS)]


class Arena:
    """Page-aligned memory for all blocks, filled with noise."""

    def __init__(self) -> None:
        stride = BLOCK_BYTES + 4096
        raw = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * stride + 4096, dtype=np.uint8)
        start = -raw.ctypes.data % 4096
        self.memory: memoryview = raw[start : start + NUM_BLOCKS * stride].data
        self.values = [
            self.memory[at * stride : at * stride + HEADER_BYTES + BLOCK_BYTES] for at in range(NUM_BLOCKS)
        ]
        """Header and block: the same bytes that the pool tier stores."""
        self.blocks = [value[HEADER_BYTES:] for value in self.values]


def gb_per_s(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return NUM_BLOCKS * BLOCK_BYTES / (time.perf_counter() - start) / 1e9


def bare_get(backend: PoolBackend, names: list[str], arena: Arena) -> None:
    """The backend's own calls in a plain loop: no thread, no deadline, no checksum."""
    for at in range(0, NUM_BLOCKS, BATCH_BLOCKS):
        some = slice(at, at + BATCH_BLOCKS)
        results = backend.get_many(names[some], [(value,) for value in arena.values[some]])
        assert set(results) == {ReadResult.HIT}


def bare_put(backend: PoolBackend, names: list[str], arena: Arena) -> None:
    for at in range(0, NUM_BLOCKS, BATCH_BLOCKS):
        some = slice(at, at + BATCH_BLOCKS)
        results = backend.put_many(names[some], [(value,) for value in arena.values[some]])
        assert set(results) == {PutResult.STORED}


def our_get(store: PoolStore, keys: list[BlockKey], into: list[memoryview]) -> None:
    assert set(store.get_many(keys, into)) == {ReadResult.HIT}


def our_lend(store: PoolStore, keys: list[BlockKey]) -> None:
    """Read as a load does, without the copy to the device."""
    start = 0
    while start < len(keys):
        loan = store.lend_many(keys[start:])
        assert set(loan.results) == {ReadResult.HIT}
        start += len(loan.results)
        loan.free()


def our_put(store: PoolStore, keys: list[BlockKey], blocks: list[memoryview]) -> None:
    puts = [BlockPut(key, BlockKey(bytes(32)), block) for key, block in zip(keys, blocks, strict=True)]
    assert set(store.put_many(puts)) == {PutResult.STORED}


@contextmanager
def loads_of(store: PoolStore) -> Iterator[Callable[[list[BlockKey]], None]]:
    """Return what brings blocks of the pool to device blocks (here plain memory) as a server does."""
    kv = DeviceKV(LAYOUT, NUM_BLOCKS)
    policy = TransferPolicy({}, load_timeout_s=600.0)
    transfer = TierTransfer(
        DeviceCopy(kv, copy_function()),
        None,
        (),
        policy,
        time.monotonic,
        block_size=LAYOUT.block_size,
        num_staging_slots=STAGING_BYTES // LAYOUT.block_bytes,
    )
    transfer.introduce(store)
    transfer.attach(store)

    def load(keys: list[BlockKey]) -> None:
        assert transfer.load(keys, range(NUM_BLOCKS)).result() == NUM_BLOCKS

    try:
        yield load
    finally:
        transfer.close()


def measure(name: str, backend: PoolBackend, num_rounds: int) -> list[tuple[str, float, float]]:
    """Return (what, ours, bare) in GB/s; medians over rounds in which all take turns."""
    registered, other = Arena(), Arena()
    settings = PoolSettings(name=name, deadline_s=30.0)
    store = PoolStore(backend, NAMES, BLOCK_BYTES, settings)
    store.register(registered.memory)
    labels = [
        "load to device",
        "read of a load",
        "get, registered memory",
        "get",
        "put, registered memory",
        "put",
    ]
    if not backend.zero_copy:
        labels = ["load to device", "read of a load", "get", "put"]
    samples: dict[str, list[tuple[float, float]]] = {label: [] for label in labels}
    with loads_of(store) as load:
        for _ in range(num_rounds):
            measure_round(backend, store, samples, registered, other, load)
    return [
        (label, statistics.median(ours for ours, _ in pairs), statistics.median(bare for _, bare in pairs))
        for label, pairs in samples.items()
    ]


def measure_round(
    backend: PoolBackend,
    store: PoolStore,
    samples: dict[str, list[tuple[float, float]]],
    registered: Arena,
    other: Arena,
    load: Callable[[list[BlockKey]], None],
) -> None:
    """Add (ours, bare) of one round to each label."""
    bare_keys = new_keys()
    bare_names = [NAMES.own(key) for key in bare_keys]
    put = gb_per_s(lambda names=bare_names: bare_put(backend, names, registered))  # type: ignore[misc]
    for label in [label for label in samples if label.startswith("put")]:
        arena = registered if "registered" in label or not backend.zero_copy else other
        keys = new_keys()
        ours = gb_per_s(lambda k=keys, a=arena: our_put(store, k, a.blocks))  # type: ignore[misc]
        samples[label].append((ours, put))
        get = gb_per_s(lambda names=bare_names: bare_get(backend, names, registered))  # type: ignore[misc]
        ours = gb_per_s(lambda k=keys, a=arena: our_get(store, k, a.blocks))  # type: ignore[misc]
        samples[label.replace("put", "get")].append((ours, get))
        if arena is registered:
            get = gb_per_s(lambda names=bare_names: bare_get(backend, names, registered))  # type: ignore[misc]
            samples["load to device"].append((gb_per_s(lambda k=keys: load(k)), get))  # type: ignore[misc]
            ours = gb_per_s(lambda k=keys: our_lend(store, k))  # type: ignore[misc]
            samples["read of a load"].append((ours, get))
        store.remove(keys)
    backend.remove(bare_names)


HOLDER = """
import json, sys, time
from stemma.memory.tiers.pool.registry import open_pool_backend
pool = open_pool_backend("mooncake", json.loads(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def mooncake() -> Iterator[PoolBackend]:
    """A master, a process with 1 GB of DRAM for the pool, and a client of ours without any."""
    import json
    import socket

    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        rpc, metrics = first.getsockname()[1], second.getsockname()[1]
    binary = str(Path(sys.executable).parent / "mooncake_master")
    flags = [f"--rpc_port={rpc}", f"--metrics_port={metrics}"]
    command = [binary, "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", *flags]
    master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1.0)
    config = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 1 << 30,
        "local_buffer_size": 64 << 20,
        "protocol": "tcp",
        "master_server_address": f"127.0.0.1:{rpc}",
    }
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, json.dumps(config)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield open_pool_backend("mooncake", config | {"global_segment_size": 0})
    finally:
        for process in (holder, master):
            process.kill()
            process.wait()


@contextmanager
def redis(directory: Path) -> Iterator[PoolBackend]:
    """A Redis server of our own, on a unix socket (it is the faster way to use one that is near)."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server") or "redis-server"
    socket_path = directory / "redis.sock"
    command = [binary, "--port", "0", "--unixsocket", str(socket_path), "--save", ""]
    server = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)
    try:
        while not socket_path.exists():
            time.sleep(0.05)
        yield open_pool_backend("redis", {"url": f"unix://{socket_path}", "socket_timeout_s": 30})
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pools", nargs="*", default=["mooncake", "redis", "directory"], help="which")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    console = Console()
    table = Table("pool", "what", "ours GB/s", "bare GB/s", "ratio", title="pool tier, 2 MB blocks")
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for name in arguments.pools:
            with _opened(name, directory) as backend:
                for what, ours, bare in measure(name, backend, arguments.rounds):
                    table.add_row(name, what, f"{ours:.2f}", f"{bare:.2f}", f"{ours / bare:.2f}")
                    failed |= name == "mooncake" and what.startswith("get, reg") and ours / bare < LIMIT
    console.print(table)
    console.print("limit missed" if failed else "limit kept", style="red" if failed else "green")
    sys.exit(failed)


def _opened(name: str, directory: Path) -> AbstractContextManager[PoolBackend]:
    if name == "mooncake":
        return mooncake()
    if name == "redis":
        return redis(directory)
    return nullcontext(open_pool_backend("directory", {"path": str(directory / "pool")}))


if __name__ == "__main__":
    main()
