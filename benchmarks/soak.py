"""Soak: mixed traffic over all local tiers for a long time, then proof that nothing leaked: `make soak`.

Sessions come and go, some are aborted, the cache is flushed now and then, the disk has write errors for a
while. Exit status 1 if memory, descriptors, threads or blocks grew, or an invariant broke. `--minutes N`.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from stemma.engine.api import GenerationRequest
from stemma.engine.llm import LLM
from stemma.engine.sampling_params import SamplingParams
from stemma.memory.disk.files import FileLayer
from stemma.memory.disk.store import DiskStore
from stemma.memory.transfer import TierTransfer
from stemma.model.tiny import write_tiny_model
from stemma.types import TokenArray

NUM_SESSIONS = 40
SAMPLE_EVERY_S = 10.0
WARM_UP = 0.25
"""Of the time: allocators and caches fill up first."""
MAX_GROWTH_BYTES = 30_000_000


class FlakyFiles(FileLayer):
    """Fails all writes while told to."""

    def __init__(self) -> None:
        self.is_broken = False

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Write, or fail as a full disk does."""
        if self.is_broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, buffers, offset)


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
        self.llm = LLM(
            write_tiny_model(folder / "model", hidden_size=96, num_layers=2),
            kv_cache_memory="1MB",
            block_size=16,
            num_threads=1,
            host_cache="4MB",
            disk_cache=folder / "cache",
            disk_cache_size="16MB",
            disk_cache_ttl_s=60.0,
            load_when="always",
        )
        lower = self.llm.engine.cache.lower
        assert isinstance(lower, TierTransfer)
        self.lower = lower
        self.files = FlakyFiles()
        self.disk = next(store for store in lower.stores if isinstance(store, DiskStore))
        self.disk._files = self.files
        self.histories = [self._tokens(64) for _ in range(NUM_SESSIONS)]
        self.num_requests = 0

    def _tokens(self, count: int) -> TokenArray:
        return np.array([self.rng.randrange(3, 400) for _ in range(count)], dtype=np.int32)

    def round(self) -> None:
        """Serve a few sessions at once, abort some, and meddle."""
        engine = self.llm.engine
        names: list[str] = []
        for number in self.rng.sample(range(NUM_SESSIONS), 6):
            if len(self.histories[number]) > 400:
                self.histories[number] = self._tokens(64)
            self.histories[number] = np.concatenate([self.histories[number], self._tokens(20)])
            self.num_requests += 1
            names.append(f"r{self.num_requests}")
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            engine.add(GenerationRequest(names[-1], self.histories[number], params))
        while engine.has_work:
            engine.step()
            if self.rng.random() < 0.02:
                engine.abort(self.rng.choice(names))
        chance = self.rng.random()
        if chance < 0.01:
            engine.flush_cache()
            self.lower.flush()
        elif chance < 0.03:
            self.files.is_broken = not self.files.is_broken

    def sample(self) -> Sample:
        """Check the invariants and measure."""
        self.llm.engine.check()
        self.lower.check()
        process = psutil.Process()
        stats = self.llm.engine.stats()
        assert stats.transfer is not None
        blocks = {"device": stats.num_cached_blocks}
        blocks |= {tier.value: one.num_blocks or 0 for tier, one in stats.transfer.tiers.items()}
        num_fds = process.num_fds() - len(self.disk._slab_fds)
        return Sample(process.memory_info().rss, num_fds, threading.active_count(), blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), given.seed)
        samples = _run(soak, 60.0 * given.minutes)
        stats = soak.llm.engine.stats()
        faults = dict(soak.disk.counters.reasons)
        print(f"{soak.num_requests} requests; cached tokens {stats.cached_tokens_by_tier}; faults {faults}")
        soak.llm.close()
    sys.exit(_verdict(samples))


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


def _verdict(samples: list[Sample]) -> int:
    settled = samples[int(len(samples) * WARM_UP) :]
    middle = len(settled) // 2
    early, late = settled[: middle or 1], settled[middle:]
    growth = max(s.rss_bytes for s in late) - max(s.rss_bytes for s in early)
    problems = []
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
