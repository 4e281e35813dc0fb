"""Soak: mixed traffic over all four tiers for a long time, then proof that nothing leaked: `make soak`.

Sessions start and end, some are aborted, the cache is flushed from time to time, the disk has write errors
for a while. Exit status 1 if memory, descriptors, threads or blocks grew, an invariant broke, or a flush at
the end leaves a block behind. `--minutes N`.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import psutil

from stemma.engine.api import GenerationRequest
from stemma.engine.build import build_engine
from stemma.engine.llm import engine_settings
from stemma.engine.sampling.params import SamplingParams
from stemma.memory.tiers import transfer
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.memory.tiers.disk.files import FileLayer
from stemma.model.files.tiny import write_tiny_model
from stemma.types import TokenArray

NUM_SESSIONS = 40
SAMPLE_EVERY_S = 10.0
WARM_UP = 0.25
"""Of the time: allocators and caches fill up first."""
MAX_GROWTH_BYTES = 30_000_000
FLUSH_EVERY_S = 150.0
BREAK_EVERY_S = 110.0
BROKEN_FOR_S = 3.0
"""The disk tier waits for half a minute more after the last error, so most of the time it works."""
DRAIN_TIMEOUT_S = 30.0
EVICTION = f"hazard:max_ghosts={1 << 12}"


def remember_little() -> None:
    """Make the table that remembers evicted blocks of lower tiers small, as `EVICTION` does on the device.

    They are bounded, but would take hours to fill here; what grows after the warm-up is then a leak.
    """
    transfer.MAX_KEYS_REMEMBERED = 1 << 12


class FlakyWrites:
    """Makes all writes of the disk tier fail while told to."""

    def __init__(self) -> None:
        self.is_broken = False

    def install(self) -> None:
        """Take the place of `FileLayer.write` for the rest of the process."""
        write = FileLayer.write

        def write_or_fail(
            files: FileLayer, fd: int, buffers: Sequence[memoryview | bytes], offset: int
        ) -> None:
            if self.is_broken:  # as a full disk fails
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(files, fd, buffers, offset)

        mock.patch.object(FileLayer, "write", write_or_fail).start()


@dataclass(frozen=True, slots=True)
class Sample:
    """What must not grow."""

    rss_bytes: int
    num_fds: int
    """Open slabs aside: the disk tier may still grow to its limit."""
    num_threads: int
    blocks: dict[str, int]


class Soak:
    """One engine under traffic."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.parts = build_engine(
            engine_settings(
                write_tiny_model(folder / "model", hidden_size=96, num_layers=2),
                kv_cache_memory="1MB",
                block_size=16,
                eviction=EVICTION,
                num_threads=1,
                host_cache="4MB",
                disk_cache=folder / "cache",
                disk_cache_size="16MB",
                disk_cache_ttl_s=60.0,
                pool="directory",
                pool_config=self._pool_config(),
                load_when="always",
            )
        )
        self.cache = self.parts.engine.cache
        self.writes = FlakyWrites()
        self.writes.install()
        self.disk = next(store for store in self.cache.below.stores if isinstance(store, DiskStore))
        self.histories = [self._tokens(64) for _ in range(NUM_SESSIONS)]
        self.num_requests = 0
        self.flushed_at = self.broken_at = time.monotonic()

    def _pool_config(self) -> Path:
        config = self.folder / "pool.json"
        config.write_text(json.dumps({"path": str(self.folder / "pool"), "capacity": "16MB"}))
        return config

    def _tokens(self, count: int) -> TokenArray:
        return np.array([self.rng.randrange(3, 400) for _ in range(count)], dtype=np.int32)

    def round(self) -> None:
        """Serve a few sessions at once, abort some, and meddle."""
        engine = self.parts.engine
        names: list[str] = []
        for number in self.rng.sample(range(NUM_SESSIONS), 6):
            if len(self.histories[number]) > 400:
                self.histories[number] = self._tokens(64)
            self.histories[number] = np.concatenate([self.histories[number], self._tokens(20)])
            self.num_requests += 1
            names.append(f"r{self.num_requests}")
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            engine.add(engine.checked(GenerationRequest(names[-1], self.histories[number], params)))
        while engine.has_work:
            engine.step()
            if self.rng.random() < 0.02:
                engine.abort(self.rng.choice(names))
        now = time.monotonic()
        if now - self.flushed_at > FLUSH_EVERY_S:
            self.flushed_at = now
            self.flush()
        if now - self.broken_at > BREAK_EVERY_S:
            self.broken_at = now
        self.writes.is_broken = now - self.broken_at < BROKEN_FOR_S

    def flush(self) -> None:
        """Drop everything from device, host and disk."""
        self.parts.engine.cache.flush()
        self.cache.below.flush()

    def leftovers(self) -> list[str]:
        """Flush when nothing runs; return what stayed although nobody holds it."""
        self.writes.is_broken = False
        self.flush()
        stats = self.parts.engine.stats()
        assert stats.transfer is not None
        left = {tier.value: one.num_blocks or 0 for tier, one in stats.transfer.tiers.items()}
        left["device"] = stats.num_cached_blocks
        left["lost on the device"] = stats.num_blocks - stats.num_free_blocks
        return [f"{count} blocks left: {where}" for where, count in left.items() if count]

    def sample(self) -> Sample:
        """Check the invariants and measure, when no write is under way."""
        assert self.cache.below.drain(DRAIN_TIMEOUT_S)
        self.parts.engine.check()
        self.cache.check()
        process = psutil.Process()
        stats = self.parts.engine.stats()
        assert stats.transfer is not None
        blocks = {"device": stats.num_cached_blocks}
        blocks |= {tier.value: one.num_blocks or 0 for tier, one in stats.transfer.tiers.items()}
        # The pool's threads open a file for each block they still read: what leaked is there all the time.
        num_fds = min(self._num_fds_now(process) for _ in range(25)) - len(
            list(self.disk.path.glob("slab-*"))
        )
        return Sample(process.memory_info().rss, num_fds, threading.active_count(), blocks)

    @staticmethod
    def _num_fds_now(process: psutil.Process) -> int:
        time.sleep(0.01)
        return int(process.num_fds())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    remember_little()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), given.seed)
        samples = _run(soak, 60.0 * given.minutes)
        stats = soak.parts.engine.stats()
        faults = dict(soak.disk.counters.reasons)
        leftovers = soak.leftovers()
        soak.parts.engine.check()
        soak.cache.check()
        print(f"{soak.num_requests} requests; cached tokens {stats.cached_tokens_by_tier}; faults {faults}")
        soak.parts.engine.close()
    sys.exit(_verdict(samples, leftovers))


def _run(soak: Soak, seconds: float) -> list[Sample]:
    start = sampled = time.monotonic()
    samples: list[Sample] = []
    while (now := time.monotonic()) - start < seconds:
        soak.round()
        if now - sampled > SAMPLE_EVERY_S:
            sampled = now
            samples.append(one := soak.sample())
            print(
                f"{now - start:7.0f} s  {soak.num_requests:7} requests  {one.rss_bytes / 1e6:7.1f} MB  "
                f"{one.num_fds} descriptors  {one.num_threads} threads  {one.blocks}",
                flush=True,
            )
    samples.append(soak.sample())
    return samples


def _verdict(samples: list[Sample], problems: list[str]) -> int:
    settled = samples[int(len(samples) * WARM_UP) :]
    middle = len(settled) // 2
    early, late = settled[: middle or 1], settled[middle:]
    growth = max(s.rss_bytes for s in late) - max(s.rss_bytes for s in early)
    if growth > MAX_GROWTH_BYTES:
        problems.append(f"memory grew by {growth / 1e6:.1f} MB")
    if max(s.num_fds for s in late) > max(s.num_fds for s in early):
        problems.append("descriptors leaked")
    if max(s.num_threads for s in late) > max(s.num_threads for s in early):
        problems.append("threads leaked")
    print("; ".join(problems) or f"nothing leaked; memory {growth / 1e6:+.1f} MB in the second half")
    return 1 if problems else 0


if __name__ == "__main__":
    main()
