"""vLLM behind our tiers: `python -m benchmarks.connectors --vllm-python PYTHON`, on a quiet machine.

One vLLM server at a time, eager, of the 0.5B shape: prompts of 2,048 tokens and 32 more, computed, taken from
vLLM's own cache, and loaded by `StemmaConnector` from host and from disk (page cache warm). Beside it the
speed of the loads in bytes a second, and that of the same bytes by our own engine's transfer. The first loads
of a process touch memory for the first time, which is slow on virtual machines: they are shown apart.
`--only` picks parts: own, host, disk (which needs what host left in `--dir`), offloading (vLLM's own
OffloadingConnector).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.checkpoint import VOCAB_SIZE, half_billion_checkpoint
from benchmarks.peers.servers import Running, Server, running, vllm
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.transfer import TierTransfer, TransferPolicy
from stemma.native.copying import copy_function
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, chain_keys
from stemma.types import Tier

PREFIX, REST = 2048, 32
BLOCK_SIZE = 128
"""VLLM's on CPU."""
NUM_PROMPTS = 3
LAYOUT = KVLayout(24, 2, BLOCK_SIZE, 2, 64, "bfloat16")


class Client:
    """Times first tokens of one server."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._http = httpx.Client(base_url=server.base_url, timeout=120.0)
        self._rng = np.random.default_rng(time.time_ns())

    def first_token_ms(self, number: int) -> tuple[float, int]:
        """Ask prompt `number` with 32 new tokens; return milliseconds and cached tokens."""
        prefix = np.random.default_rng(number).integers(10, VOCAB_SIZE, PREFIX).tolist()
        prompt = prefix + self._rng.integers(10, VOCAB_SIZE, REST).tolist()
        body = {"model": self._server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        answer = self._http.post("/v1/completions", json=body)
        took_ms = 1e3 * (time.perf_counter() - began)
        answer.raise_for_status()
        return took_ms, int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def round(self, name: str, expect_cached: int) -> None:
        """Ask each prompt once and print the median."""
        found = [self.first_token_ms(number) for number in range(NUM_PROMPTS)]
        times, cached = [one[0] for one in found], {one[1] for one in found}
        note = "" if cached == {expect_cached} else f"  CACHED {sorted(cached)}, expected {expect_cached}"
        texts = ", ".join(f"{ms:.0f}" for ms in times)
        print(f"{name:38} {statistics.median(times):8.0f} ms  ({texts}){note}", flush=True)

    def reset_device(self) -> None:
        """Empty vLLM's own cache, and nothing below it."""
        while not self._http.post("/reset_prefix_cache").json()["success"]:
            time.sleep(0.05)

    def loaded(self) -> tuple[float, float]:
        """Return bytes and seconds of all loads so far; counts reach /metrics with a step."""
        self._ask_little()
        lines = self._http.get("/metrics").text.splitlines()

        def total(name: str) -> float:
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

        return total("stemma_connector_loaded_bytes_total"), total("stemma_connector_load_seconds_total")

    def _ask_little(self) -> None:
        for _ in range(2):
            body = {"model": self._server.model, "prompt": [11, 12], "max_tokens": 2, "temperature": 0}
            self._http.post("/v1/completions", json=body).raise_for_status()
            time.sleep(0.3)


def server_with(python: Path, checkpoint: Path, transfer: dict[str, Any] | None) -> Server:
    """Return vLLM, eager and with a connector."""
    plain = vllm(python, checkpoint, 2, eager=True)
    extra = () if transfer is None else ("--kv-transfer-config", json.dumps(transfer))
    root = Path(__file__).parents[1]
    source = f"{root / 'src'}:{root / 'packages/connect/src'}"
    environment = {**plain.environment, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": source}
    return replace(plain, command=(*plain.command, *extra), environment=environment)


@contextmanager
def served(server: Server) -> Iterator[Client]:
    with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as log:
        print(f"log: {log.name}", flush=True)
        with running(server, log) as run:
            yield Client(run)


def with_tiers(python: Path, checkpoint: Path, root: Path, *, has_host: bool) -> Server:
    transfer = {
        "kv_connector": "StemmaConnector",
        "kv_connector_module_path": "stemma_connect.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **({"host_cache": "400MB"} if has_host else {}),
            "disk_cache": str(root / "disk"),
            "disk_cache_size": "2GB",
        },
    }
    return server_with(python, checkpoint, transfer)


def host(python: Path, checkpoint: Path, root: Path) -> None:
    """First tokens with `StemmaConnector`: computed, and from the host tier."""
    with served(with_tiers(python, checkpoint, root, has_host=True)) as client:
        client.round("computed", 0)
        client.round("vLLM's own cache", PREFIX)
        before = client.loaded()
        for _ in range(2):
            client.reset_device()
            client.round("host tier", PREFIX)
        print_speed("host tier, load", before, client.loaded())


def disk(python: Path, checkpoint: Path, root: Path) -> None:
    """First tokens after a restart: the disk tier has what `host` left there. No host tier takes it over."""
    with served(with_tiers(python, checkpoint, root, has_host=False)) as client:
        before = client.loaded()
        client.round("disk tier, after a restart", PREFIX)
        print_speed("disk tier, first loads", before, client.loaded())
        before = client.loaded()
        for _ in range(3):
            client.reset_device()
            client.round("disk tier", PREFIX)
        print_speed("disk tier, load", before, client.loaded())


def offloading(python: Path, checkpoint: Path, root: Path) -> None:
    """First tokens with vLLM's own connector, if it runs here."""
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 400_000_000},
    }
    with served(server_with(python, checkpoint, transfer)) as client:
        client.round("computed", 0)
        for _ in range(2):
            client.reset_device()
            client.round("OffloadingConnector", PREFIX)


def own(python: Path, checkpoint: Path, root: Path) -> None:
    """The same bytes by the transfer of our own engine."""
    load_of_ours(Tier.HOST, root)
    load_of_ours(Tier.DISK, root)
    fresh = get_context("spawn").Process(target=load_of_ours, args=(Tier.DISK, root))
    fresh.start()  # the disk has all by now: its first loads are those after a restart
    fresh.join()


def load_of_ours(tier: Tier, root: Path) -> None:
    """Load as many prompts as vLLM is asked, several times; print the speed of the first and of the rest."""
    num_blocks = PREFIX // BLOCK_SIZE
    total = NUM_PROMPTS * num_blocks
    space = KeySpace("benchmark", LAYOUT.describe(), BLOCK_SIZE)
    first = space.root(DEFAULT_NAMESPACE)
    keys = chain_keys(first, np.arange(total * BLOCK_SIZE, dtype=np.int32), BLOCK_SIZE)
    parents = [first, *keys]
    blocks = [DeviceBlock(n, key, parents[n], BLOCK_SIZE) for n, key in enumerate(keys)]
    kv = DeviceKV(LAYOUT, total)
    host = HostStore(LAYOUT.block_bytes, 400_000_000, make_policy("lru"), time.monotonic)
    disk = DiskStore(root / "own", space, LAYOUT.block_bytes, 10**9, make_policy("lru"), time.time)
    transfer = TierTransfer(
        DeviceCopy(kv, copy_function()),
        host if tier is Tier.HOST else None,
        [] if tier is Tier.HOST else [disk],
        TransferPolicy({Tier.HOST: "write_through", Tier.DISK: "write_through"}),
        time.monotonic,
        block_size=BLOCK_SIZE,
        num_staging_slots=128 * 2**20 // LAYOUT.block_bytes,
    )
    is_there = tier is Tier.DISK and all(disk.exists_many(keys))
    if not is_there:
        kv.data.copy_(torch.randn(kv.data.shape))
        transfer.on_commit(blocks)
        transfer.drain(60.0)
    times = []
    for at in [*range(0, total, num_blocks)] * 4:
        began = time.perf_counter()
        ids = range(at, at + num_blocks)
        assert transfer.load(keys[at : at + num_blocks], ids).result() == num_blocks
        times.append(time.perf_counter() - began)
        time.sleep(0.1)
    num_bytes = num_blocks * LAYOUT.block_bytes
    for name, some in (("first loads", times[:NUM_PROMPTS]), ("load", times[NUM_PROMPTS:])):
        where = f"our own {name}, {tier}{', after a restart' if is_there else ''}"
        print(f"{where:38} {num_bytes / statistics.mean(some) / 1e9:8.2f} GB/s", flush=True)
    transfer.close()
    disk.close()


def print_speed(name: str, before: tuple[float, float], after: tuple[float, float]) -> None:
    num_bytes, seconds = after[0] - before[0], after[1] - before[1]
    print(f"{name:38} {num_bytes / seconds / 1e9:8.2f} GB/s  ({num_bytes / 1e6:.0f} MB)", flush=True)


PARTS = {"own": own, "host": host, "disk": disk, "offloading": offloading}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--dir", type=Path, help="keep the disk tier there")
    options = parser.parse_args()
    checkpoint = half_billion_checkpoint()
    root = options.dir or Path(tempfile.mkdtemp())
    root.mkdir(exist_ok=True)
    try:
        for name in options.only or PARTS:
            try:
                PARTS[name](options.vllm_python, checkpoint, root)
            except RuntimeError as error:  # e.g. vLLM's own connector, which refuses CPUs
                print(f"{name}: {error}")
    finally:
        if options.dir is None:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
