"""Tiers against the machine's own limits, and against doing without: `python -m benchmarks.tiers`.

Each row is a ratio within one run, both sides taking turns; medians. `--only NAME` picks sections (restore,
disk, restart, demote, sessions), `--quick` shortens, `--dir DIR` says which disk to measure, `--json FILE`
keeps the rows. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.checkpoint import VOCAB_SIZE, half_billion_checkpoint
from stemma.config.settings import TierSettings
from stemma.engine.api import GenerationRequest
from stemma.engine.build import EngineParts, build_engine
from stemma.engine.llm import engine_settings
from stemma.engine.sampling.params import SamplingParams
from stemma.memory.device.copy import DeviceCopy
from stemma.memory.device.kv import DeviceKV
from stemma.memory.device.layout import KVLayout
from stemma.memory.tiers.block_store import BlockStore
from stemma.memory.tiers.device_block import DeviceBlock
from stemma.memory.tiers.disk.disk_store import DiskStore, size_for_blocks
from stemma.memory.tiers.disk.record import Record
from stemma.memory.tiers.disk.spaces import new_manifest
from stemma.memory.tiers.host_store import HostStore
from stemma.memory.tiers.opening import open_tiers
from stemma.memory.tiers.transfer import TierTransfer, TransferPolicy
from stemma.native.copying import copy_function
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, chain_keys
from stemma.types import BlockKey, Tier

LAYOUT = KVLayout(24, 2, 64, 2, 64, "bfloat16")
"""A block of the 0.5B shape: 786 kB."""
SPACE = KeySpace("benchmark", LAYOUT.describe(), LAYOUT.block_size)
ROOT = SPACE.root(DEFAULT_NAMESPACE)
_NUM_TURNS = 10
_NUM_COLD_READS = 15
"""Single ones differ by a third."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    ours: float
    baseline: float
    unit: str
    goal: str

    @property
    def ratio(self) -> float:
        """Ours over the baseline."""
        return self.ours / self.baseline


@dataclass(frozen=True, slots=True)
class Options:
    """How long and where."""

    quick: bool
    directory: Path


def timed_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def keys_of(num_blocks: int, seed: int = 0) -> list[BlockKey]:
    tokens = np.random.default_rng(seed).integers(0, 1000, num_blocks * LAYOUT.block_size).astype(np.int32)
    return chain_keys(ROOT, tokens, LAYOUT.block_size)


def device_blocks(keys: Sequence[BlockKey]) -> list[DeviceBlock]:
    parents = [ROOT, *keys]
    size = LAYOUT.block_size
    return [DeviceBlock(n, key, parents[n], size) for n, key in enumerate(keys)]


def open_transfer(kv: DeviceKV, *stores: BlockStore, staging_bytes: int = 128 * 2**20) -> TierTransfer:
    policy = TransferPolicy({Tier.HOST: "write_back", Tier.DISK: "write_through"}, load_timeout_s=600.0)
    return TierTransfer(
        DeviceCopy(kv, copy_function()),
        next((store for store in stores if isinstance(store, HostStore)), None),
        [store for store in stores if store.tier is not Tier.HOST],
        policy,
        time.monotonic,
        block_size=LAYOUT.block_size,
        num_staging_slots=staging_bytes // LAYOUT.block_bytes,
    )


def restore(options: Options) -> Iterator[Row]:
    """Blocks from the host tier to the device, against a memcpy of the same bytes."""
    num_blocks = 128 if options.quick else 512
    num_bytes = num_blocks * LAYOUT.block_bytes
    kv = DeviceKV(LAYOUT, num_blocks)
    kv.data.fill_(1.0)
    host = HostStore(LAYOUT.block_bytes, num_bytes, make_policy("lru"), time.monotonic)
    transfer = open_transfer(kv, host)
    keys = keys_of(num_blocks)
    transfer.on_evict(device_blocks(keys)[::-1])
    source = np.ones(num_bytes, dtype=np.uint8)
    target = np.ones(num_bytes, dtype=np.uint8)
    ours, plain = [], []
    for _ in range(9):
        plain.append(timed_s(lambda: np.copyto(target, source)))
        ours.append(timed_s(lambda: transfer.load(keys, range(num_blocks)).result()))
    assert transfer.stats().loads.loaded_blocks[Tier.HOST] == 9 * num_blocks
    transfer.close()
    yield _bandwidth("host -> device / memcpy", num_bytes, ours, plain, ">= 0.8")


def disk(options: Options) -> Iterator[Row]:
    """Blocks from the disk tier to the device, page cache dropped, against a plain sequential read."""
    num_blocks = 128 if options.quick else 512
    num_bytes = num_blocks * LAYOUT.block_bytes
    root = Path(tempfile.mkdtemp(dir=options.directory))
    kv = DeviceKV(LAYOUT, num_blocks)
    raw = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    kv.data.view(torch.uint8).view(-1).copy_(torch.from_numpy(raw))
    size = size_for_blocks(new_manifest(SPACE, LAYOUT.block_bytes, 0), num_blocks)
    store = DiskStore(root, SPACE, LAYOUT.block_bytes, size, make_policy("lru"), time.time)
    transfer = open_transfer(kv, store, staging_bytes=num_bytes)
    keys = keys_of(num_blocks)
    start = time.perf_counter()
    transfer.on_commit(device_blocks(keys))
    transfer.drain(600.0)
    written_s = time.perf_counter() - start
    plain_file = root / "plain"
    plain_file.write_bytes(raw.tobytes())
    ours, plain = [], []
    for _ in range(_NUM_COLD_READS):
        drop_pages([plain_file])
        plain.append(timed_s(lambda: read_plainly(plain_file)))
        drop_pages(list(store.path.glob("slab-*")))
        ours.append(timed_s(lambda: transfer.load(keys, range(num_blocks)).result()))
    assert transfer.stats().loads.loaded_blocks[Tier.DISK] == _NUM_COLD_READS * num_blocks
    transfer.close()
    shutil.rmtree(root)
    yield _bandwidth("disk -> device / sequential read", num_bytes, ours, plain, ">= 0.8")
    yield Row("write-through into the page cache", num_bytes / written_s / 1e9, 1.0, "GB/s", "-")


def restart(options: Options) -> Iterator[Row]:
    """A new process's time to know a million blocks."""
    num_blocks = 100_000 if options.quick else 1_000_000
    root = Path(tempfile.mkdtemp(dir=options.directory))
    block_bytes = 64  # the index doesn't grow with the block
    manifest = new_manifest(SPACE, block_bytes, 0)
    size = size_for_blocks(manifest, num_blocks)
    store = DiskStore(root, SPACE, block_bytes, size, make_policy("lru"), time.time)
    per_slab, path = new_manifest(SPACE, block_bytes, size).slots_per_slab, store.path
    store.close()
    for slab, first in enumerate(range(0, num_blocks, per_slab)):
        with (path / f"slab-{slab:05d}").open("wb") as file:
            file.truncate(min(per_slab, num_blocks - first) * manifest.slot_bytes)
    rng = np.random.default_rng(0)
    with (path / "index").open("wb") as file:
        parent = ROOT
        for slot in range(num_blocks):
            key = BlockKey(rng.bytes(32))
            record = Record(slot, key, parent, slot + 1, 0, block_bytes, "", 2.0 + slot % 9999)
            file.write(record.pack())
            parent = ROOT if slot % 50 == 49 else key
    times = []
    for _ in range(3):
        start = time.perf_counter()
        store = DiskStore(root, SPACE, block_bytes, size, make_policy("lru"), time.time)
        times.append(time.perf_counter() - start)
        assert store.num_blocks == num_blocks
        store.close()
    shutil.rmtree(root)
    per_million = statistics.median(times) * 1e6 / num_blocks
    yield Row("restart, a million blocks", per_million, 2.0, "s", "<= 1.0")


def demote(options: Options) -> Iterator[Row]:
    """Decode steps while a gigabyte goes to disk, against decode steps alone."""
    root = Path(tempfile.mkdtemp(dir=options.directory))
    num_steps = 60 if options.quick else 200
    goal_bytes = 250_000_000 if options.quick else 1_000_000_000
    parts = build_engine(
        engine_settings(
            half_billion_checkpoint(),
            kv_cache_memory="600MB",
            num_threads=1,
        )
    )
    # Beside the engine's own cache, which would write what the steps commit, too.
    lower = open_tiers(
        TierSettings(disk_cache=root, disk_cache_size=3 * 10**9),
        parts.device,
        parts.key_space,
        step_tokens=2048,
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=4 * num_steps + 64, temperature=0.0, ignore_eos=True)
    for number in range(4):
        tokens = rng.integers(3, VOCAB_SIZE - 64, 256).astype(np.int32)
        parts.engine.add(parts.engine.checked(GenerationRequest(f"r{number}", tokens, params)))
    for _ in range(16):
        parts.engine.step()
    per_step = max(1, goal_bytes // LAYOUT.block_bytes // num_steps)
    idle, busy = [], []
    written = 0
    # In turns, because contexts grow and so do steps.
    for _ in range(_NUM_TURNS):
        idle += [timed_s(parts.engine.step) for _ in range(num_steps // _NUM_TURNS)]
        for _ in range(num_steps // _NUM_TURNS):
            blocks = device_blocks(keys_of(per_step, seed=written))

            def step(blocks: list[DeviceBlock] = blocks) -> None:
                lower.on_commit(blocks)
                parts.engine.step()

            busy.append(timed_s(step))
            written += per_step
        lower.drain(600.0)
    stats = lower.stats()
    lower.close()
    parts.engine.close()
    shutil.rmtree(root)
    dropped = sum(stats.dropped_writes.values())
    name = f"step p99, {written} blocks demoted ({dropped} dropped) / idle"
    yield Row(name, 1e3 * _p99(busy), 1e3 * _p99(idle), "ms", "<= 1.1")
    name = "step p50, the same"
    yield Row(name, 1e3 * statistics.median(busy), 1e3 * statistics.median(idle), "ms", "-")


def sessions(options: Options) -> Iterator[Row]:
    """Conversations whose KV is four times the device, in turn, with and without a host tier."""
    num_tokens = 1024 if options.quick else 4096
    num_sessions, num_turns = 8, 2
    tokens_total = num_sessions * (num_tokens + num_turns * 80)
    device_bytes = LAYOUT.bytes_per_token * tokens_total // 4
    times: dict[bool, float] = {}
    ttft: dict[bool, list[float]] = {}
    for has_host in (True, False):
        host = {"host_cache": 2 * LAYOUT.bytes_per_token * tokens_total} if has_host else {}
        parts = build_engine(engine_settings(half_billion_checkpoint(), kv_cache_memory=device_bytes, **host))
        rng = np.random.default_rng(0)
        histories = [
            rng.integers(3, VOCAB_SIZE - 64, num_tokens).astype(np.int32) for _ in range(num_sessions)
        ]
        for history in histories:
            serve(parts, history, 1)
        ttft[has_host] = []
        start = time.perf_counter()
        for _ in range(num_turns):
            for number, history in enumerate(histories):
                question = rng.integers(3, VOCAB_SIZE - 64, 64).astype(np.int32)
                prompt = np.concatenate([history, question])
                first_s, answer = serve(parts, prompt, 16)
                ttft[has_host].append(first_s)
                histories[number] = np.concatenate([prompt, answer])
        times[has_host] = time.perf_counter() - start
        parts.engine.close()
    turns = num_sessions * num_turns
    yield Row(
        f"turns a second, {num_tokens}-token sessions, 4 x device",
        turns / times[True],
        turns / times[False],
        "1/s",
        ">= 2",
    )
    yield Row(
        "TTFT p50 of returning sessions / recompute",
        1e3 * statistics.median(ttft[True]),
        1e3 * statistics.median(ttft[False]),
        "ms",
        "<= 0.3",
    )


def serve(
    parts: EngineParts, prompt: np.ndarray[tuple[int], np.dtype[np.int32]], num_tokens: int
) -> tuple[float, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Serve one request alone; return the seconds to its first token, and its tokens."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    start, first_s = time.perf_counter(), 0.0
    parts.engine.add(parts.engine.checked(GenerationRequest(f"r{time.perf_counter_ns()}", prompt, params)))
    taken: list[int] = []
    while parts.engine.has_work:
        for news in parts.engine.step():
            first_s = first_s or time.perf_counter() - start
            taken.extend(news.token_ids)
    return first_s, np.array(taken, dtype=np.int32)


def read_plainly(path: Path) -> None:
    """Read the file once, in order."""
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def drop_pages(paths: Sequence[Path]) -> None:
    """Have the kernel drop the files' pages from memory."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _bandwidth(name: str, num_bytes: int, ours: list[float], plain: list[float], goal: str) -> Row:
    mine, theirs = num_bytes / statistics.median(ours) / 1e9, num_bytes / statistics.median(plain) / 1e9
    return Row(name, mine, theirs, "GB/s", goal)


def _p99(times: Sequence[float]) -> float:
    return float(np.percentile(times, 99))


SECTIONS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "restore": restore,
    "disk": disk,
    "restart": restart,
    "demote": demote,
    "sessions": sessions,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", choices=sorted(SECTIONS), help="run these sections")
    parser.add_argument("--quick", action="store_true", help="fewer blocks, shorter sessions")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="disk to measure")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    options = Options(quick=given.quick, directory=given.dir)
    rows: list[Row] = []
    for name in given.only or SECTIONS:
        for row in SECTIONS[name](options):
            rows.append(row)
            print(
                f"{row.name:62} {row.ours:9.2f} {row.baseline:9.2f} {row.unit:5} "
                f"ratio {row.ratio:5.2f}  goal {row.goal}",
                flush=True,
            )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=2))


if __name__ == "__main__":
    main()
