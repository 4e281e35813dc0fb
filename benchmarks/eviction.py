"""What eviction costs: nanoseconds per block access, by policy and cache size.

``python -m benchmarks.eviction [--policies lru,hazard] [--sizes 1000,1000000]``

Policies are driven as an index drives them: each block of a stream is looked up; a hit is an `access`, a miss
an `insert` and `offer` and, once the cache is full, a `victim`, `drop` and `offer`. Identities are
Zipf-like, in prompts of 16 blocks. Beside each time stands its ratio to LRU at the same size: believe that,
since absolute times depend on the machine.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import numpy.typing as npt

from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.prefix.radix import RadixIndex
from stemma_lab.policies.registry import LAB_POLICIES
from stemma_lab.policies.registry import make_lab_policy as make_policy

PROMPT_BLOCKS = 16
NUM_ACCESSES = 200_000


def chains(num_prompts: int, num_sessions: int, seed: int) -> list[npt.NDArray[np.int32]]:
    """Return prompts of sessions drawn by a Zipf-like law; half of them hit an earlier prompt's blocks."""
    rng = np.random.default_rng(seed)
    ranks = rng.random(num_prompts) ** 2 * num_sessions
    return [np.arange(PROMPT_BLOCKS, dtype=np.int32) + int(rank) * PROMPT_BLOCKS for rank in ranks]


def nanoseconds(policy: str, size: int) -> float:
    """Return the mean time per block access of a full cache of `size` blocks."""
    index = RadixIndex(1, make_policy(policy))
    free = list(range(size + PROMPT_BLOCKS))
    num_sessions = 2 * size // PROMPT_BLOCKS
    warm = chains(0, 1, 0) + [
        np.arange(PROMPT_BLOCKS, dtype=np.int32) + i * PROMPT_BLOCKS for i in range(size // PROMPT_BLOCKS + 1)
    ]
    now = 0.0
    for chain in warm:
        now += 0.01
        serve(index, chain, free, size, now)
    measured = chains(NUM_ACCESSES // PROMPT_BLOCKS, num_sessions, 1)
    started = time.process_time()
    for chain in measured:
        now += 0.01
        serve(index, chain, free, size, now)
    return (time.process_time() - started) / NUM_ACCESSES * 1e9


def serve(index: RadixIndex, chain: npt.NDArray[np.int32], free: list[int], size: int, now: float) -> None:
    """Look a prompt up, use what is there, enter the rest and make room."""
    match = index.match(DEFAULT_NAMESPACE, chain)
    if match.num_tokens:
        index.touch(match.block_ids, now)
    num_missing = len(chain) - match.num_tokens
    if num_missing:
        fresh = np.asarray([free.pop() for _ in range(num_missing)], dtype=np.int32)
        ids = np.concatenate((match.block_ids, fresh))
        index.insert(DEFAULT_NAMESPACE, chain, ids, now, BlockTraits(chain.astype(np.uint64) + np.uint64(1)))
        if index.num_blocks > size:
            free.extend(index.evict(index.num_blocks - size, now).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default=",".join(sorted(LAB_POLICIES)))
    parser.add_argument("--sizes", default="1000,10000,100000,1000000")
    options = parser.parse_args()
    sizes = [int(part) for part in options.sizes.split(",")]
    print("policy      " + "".join(f"{size:>22,}" for size in sizes))
    base = {size: nanoseconds("lru", size) for size in sizes}
    for policy in options.policies.split(","):
        cells = []
        for size in sizes:
            took = base[size] if policy == "lru" else nanoseconds(policy, size)
            cells.append(f"{took:>12,.0f} ns {took / base[size]:>5.2f} x")
        print(f"{policy:<12}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
