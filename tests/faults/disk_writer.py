"""A process that writes blocks into a disk store until it is killed: ``disk_writer ROOT SEED``."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from stemma.memory.tiers.block_store import PutResult
from stemma.memory.tiers.disk.disk_store import DiskStore
from stemma.prefix.eviction.lru import LRUPolicy
from tests.contracts.block_store_suite import BLOCK_BYTES, chain
from tests.memory.tiers.small_disks import SPACE, size_for

CAPACITY = 32


def main() -> None:
    root, seed = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    store = DiskStore(root, SPACE, BLOCK_BYTES, size_for(CAPACITY), LRUPolicy(), time.time)
    for turn in range(10**6):
        blocks = chain(rng.randrange(40), rng.randrange(1, 6))
        results = store.put_many(blocks)
        if turn % 7 == 0:
            store.remove([blocks[-1].key])
        if PutResult.STORED in results:
            print(turn, flush=True)


if __name__ == "__main__":
    main()
