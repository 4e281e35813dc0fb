"""vLLM's tensors over real tiers: what goes down comes back, damage is a miss, and questions are answered."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packages.connect.tests.vllm.stand_ins import BLOCK_SIZE, SPACE
from tests.memory.recording_supervisor import RecordingSupervisor

from stemma.errors import ConfigError, StorageError
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.disk.record import RECORD_BYTES
from stemma.memory.tiers.disk.spaces import read_manifest
from stemma.prefix.keys import DEFAULT_NAMESPACE, chain_keys
from stemma.types import Tier, as_tokens
from stemma_connect.settings import ConnectorSettings
from stemma_connect.vllm.blocks import VllmBlocks
from stemma_connect.vllm.cores import on_all_cores
from stemma_connect.vllm.lookup import Lookup, LookupClient, LookupServer, socket_path
from stemma_connect.vllm.work import LoadWork, StepWork
from stemma_connect.vllm.worker import WorkerSide

NUM_BLOCKS = 8
ROOT = SPACE.root(DEFAULT_NAMESPACE)
KEYS = chain_keys(ROOT, as_tokens(range(BLOCK_SIZE * NUM_BLOCKS)), BLOCK_SIZE)
TIMEOUT_S = 20.0


def make_caches() -> dict[str, torch.Tensor]:
    """Two layers as vLLM keeps them on CPU, [block, head, token, K and V], filled with numbers."""
    torch.manual_seed(0)
    return {f"layers.{n}": torch.randn(NUM_BLOCKS, 2, BLOCK_SIZE, 16) for n in range(2)}


class Rig:
    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.caches = make_caches()
        self.blocks = VllmBlocks(self.caches, NUM_BLOCKS)
        self.supervisor = RecordingSupervisor()
        self.opened: list[WorkerSide] = []

    def open(self, **settings) -> WorkerSide:
        given = {"disk_cache": str(self.tmp_path / "disk"), "disk_cache_size": "2MB"} | settings
        parsed = ConnectorSettings.parse({k: v for k, v in given.items() if v}, where="test")
        self.opened.append(WorkerSide(parsed, self.blocks, SPACE, self.supervisor, step_tokens=512))
        return self.opened[-1]

    def load(self, side: WorkerSide, count: int, first: int = 0) -> set[int]:
        """Load the first `count` keys into blocks from `first` on; return the blocks that failed."""
        ids = list(range(first, first + count))
        side.start_loads(StepWork(loads=[LoadWork("a", KEYS[:count], ids)]))
        done: set[str] = set()
        while not done:
            done = side.finished(is_idle=True)[1]
        assert done == {"a"}
        return side.take_failed()


def saves(count: int) -> list[DeviceBlock]:
    parents = [ROOT, *KEYS]
    return [DeviceBlock(n, KEYS[n], parents[n], BLOCK_SIZE) for n in range(count)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for side in rig.opened:
        side.close()
    assert rig.supervisor.failures == []


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_saved_blocks_come_back_into_other_blocks(rig, tier):
    side = rig.open(**({"host_cache": "1MB", "disk_cache": None} if tier is Tier.HOST else {}))
    before = {name: cache.clone() for name, cache in rig.caches.items()}
    side.save(StepWork(saves=saves(3), handed_over=["a"]))
    assert side.finished(is_idle=False) == ({"a"}, set())
    assert side.drain(TIMEOUT_S)
    for cache in rig.caches.values():
        cache.zero_()
    assert rig.load(side, 3, first=4) == set()
    for name, cache in rig.caches.items():
        assert torch.equal(cache[4:7], before[name][:3])
        assert not cache[:4].any()
    counts = side.take_counts()
    assert counts[f"loaded_blocks/{tier}"] == 3
    assert counts[f"loaded_bytes/{tier}"] == 3 * rig.blocks.block_bytes
    assert counts["load_seconds"] > 0
    assert side.take_counts() == {}


def test_blocks_outlive_the_process(rig):
    first = rig.open()
    first.save(StepWork(saves=saves(3)))
    first.close()
    before = rig.caches["layers.1"].clone()
    rig.caches["layers.1"].zero_()
    second = rig.open()
    assert second.lookup.find("a", ROOT, KEYS) == (Tier.DISK,) * 3
    assert rig.load(second, 3) == set()
    assert torch.equal(rig.caches["layers.1"][:3], before[:3])


def test_flipped_bytes_are_a_counted_miss_and_the_blocks_before_them_count(rig):
    side = rig.open()
    side.save(StepWork(saves=saves(3)))
    assert side.drain(TIMEOUT_S)
    (folder,) = [path for path in (rig.tmp_path / "disk").iterdir() if path.is_dir()]
    manifest = read_manifest(folder)
    assert manifest is not None
    with (folder / "slab-00000").open("r+b") as slab:
        slab.seek(manifest.slot_bytes + RECORD_BYTES + 5)
        slab.write(b"\xff\x00\xff")
    good = rig.caches["layers.0"].clone()
    assert rig.load(side, 3, first=4) == {5, 6}
    assert torch.equal(rig.caches["layers.0"][4], good[0])
    assert torch.equal(rig.caches["layers.0"][5:7], good[5:7])  # nothing was written there
    counts = side.take_counts()
    assert counts["lost_blocks/disk/corrupt"] == 1
    assert counts["failures/disk/checksum"] == 1
    assert side.lookup.find("a", ROOT, KEYS) == (Tier.DISK,)


def test_missing_blocks_fail_their_blocks_only(rig):
    side = rig.open(host_cache="1MB")
    side.save(StepWork(saves=saves(2)))
    assert rig.load(side, 4) == {2, 3}


def test_loads_slower_than_computing_are_not_offered(rig):
    side = rig.open(host_cache="1MB", disk_cache=None)
    side.save(StepWork(saves=saves(3)))
    assert rig.load(side, 3) == set()
    side.begin()
    side.save(StepWork(num_tokens=10**9, num_prompt_tokens=10**9))  # a step that took no time per token
    assert side.lookup.find("a", ROOT, KEYS) == ()
    assert rig.open(host_cache="1MB", load_when="always", disk_cache=None)


def test_a_pool_is_asked_in_the_background(rig, tmp_path):
    config = tmp_path / "pool.json"
    config.write_text(f'{{"path": "{tmp_path / "pool"}"}}')
    pool = {"name": "directory", "config": str(config), "staging": "4MB"}
    first = rig.open(disk_cache=None, pool=pool)
    first.save(StepWork(saves=saves(2)))
    first.close()
    second = rig.open(disk_cache=None, pool=pool)
    found = second.lookup.find("a", ROOT, KEYS)
    while found is None:
        found = second.lookup.find("a", ROOT, KEYS)
    assert found == (Tier.POOL,) * 2
    assert rig.load(second, 2, first=5) == set()


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (torch.zeros(3, 2, 4, 8), "not one tensor of 8 blocks"),
        (torch.zeros(8, 2, 4, 16)[..., :8], "is not one run of bytes"),
        ([torch.zeros(8, 4)], "keeps list"),
    ],
)
def test_layouts_that_cannot_be_saved_are_refused(cache, says):
    with pytest.raises(ConfigError, match=says):
        VllmBlocks({"layers.0": cache}, NUM_BLOCKS)


def test_layouts_differ_where_bytes_would():
    plain = VllmBlocks({"a": torch.zeros(8, 2, 4, 8)}, 8)
    turned = VllmBlocks({"a": torch.zeros(8, 4, 2, 8).transpose(1, 2)}, 8)
    half = VllmBlocks({"a": torch.zeros(8, 2, 4, 8, dtype=torch.float16)}, 8)
    assert len({plain.layout, turned.layout, half.layout}) == 3
    assert plain.block_bytes == turned.block_bytes == 2 * half.block_bytes


def test_large_copies_by_two_threads_and_back():
    """Three blocks of 1.5 MiB each."""
    caches = {f"layers.{n}": torch.randn(NUM_BLOCKS, 2, 64, 1536) for n in range(2)}
    before = {name: cache.clone() for name, cache in caches.items()}
    blocks = VllmBlocks(caches, NUM_BLOCKS)
    buffers = [torch.empty(blocks.block_bytes, dtype=torch.uint8) for _ in range(3)]
    blocks.out([6, 0, 3], buffers)
    for beside_reads in (False, True):
        for cache in caches.values():
            cache.zero_()
        blocks.into([1, 2, 7], buffers, beside_reads=beside_reads)
        for name, cache in caches.items():
            assert torch.equal(cache[[1, 2, 7]], before[name][[6, 0, 3]])
            assert not cache[[0, 3, 4, 5, 6]].any()


def test_our_threads_may_run_on_every_core():
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("this machine has one core")
    found: list[set[int]] = []

    def bound_as_vllms_worker() -> None:
        os.sched_setaffinity(0, {min(allowed)})
        with on_all_cores():
            inner = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
            inner.start()
            inner.join()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=bound_as_vllms_worker)
    thread.start()
    thread.join()
    assert found == [allowed, {min(allowed)}]


class TestLookup:
    @pytest.fixture
    def path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        return socket_path("engine")

    @pytest.fixture
    def client(self, rig: Rig, path: Path) -> Iterator[LookupClient]:
        side = rig.open(host_cache="1MB")
        side.save(StepWork(saves=saves(2)))
        server = LookupServer(path, SPACE, side.lookup, rig.supervisor)
        client = LookupClient(path)
        yield client
        client.close()
        server.close()

    def test_it_answers(self, client):
        assert client.space() == SPACE
        assert client.find("a", ROOT, KEYS) == (Tier.HOST, Tier.HOST)
        assert client.find("ü" * 3000, ROOT, KEYS[:1]) == (Tier.HOST,)
        assert client.find("a", ROOT, []) == ()
        assert client.clear()
        assert client.find("a", ROOT, KEYS) == ()
        assert client.num_failed == 0

    @pytest.mark.one_in(3)
    @pytest.mark.parametrize(
        "message", [b"\x05\0\0\0Xabcd", b"\xff\xff\xff\xff", b"\x03\0\0\0F\0\0", b"\1\0"]
    )
    def test_bytes_that_are_no_question_end_their_connection_only(self, client, path, message):
        with socket.socket(socket.AF_UNIX) as other:
            other.settimeout(TIMEOUT_S)
            other.connect(str(path))
            other.sendall(message)
            other.shutdown(socket.SHUT_WR)
            assert other.recv(100) == b""
        assert client.find("a", ROOT, KEYS) == (Tier.HOST, Tier.HOST)

    def test_an_error_that_nobody_expects_is_reported(self, rig, path):
        class Broken(Lookup):
            def find(self, request_id, parent, keys):
                raise KeyError("a bug")

            def clear(self) -> bool:
                return True

        supervisor = RecordingSupervisor()
        server = LookupServer(path, SPACE, Broken(), supervisor)
        client = LookupClient(path)
        assert client.find("a", ROOT, KEYS) == ()
        supervisor.wait(1)
        server.close()

    def test_nobody_there_is_a_miss(self, path):
        client = LookupClient(path)
        assert client.find("a", ROOT, KEYS) == ()
        assert client.num_failed == 1
        assert not client.clear()
        with pytest.raises(StorageError, match="doesn't answer"):
            client.space()

    def test_its_directory_is_private(self, path):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        path.parent.chmod(0o755)
        with pytest.raises(StorageError, match="nobody else may enter"):
            socket_path("engine")
        path.parent.chmod(0o700)
        with pytest.raises(StorageError, match="set TMPDIR"):
            socket_path("e" * 100)
        assert path.parent.name == f"stemma-{os.getuid()}"
