"""Memory and time of a router's index of blocks: `python -m benchmarks.router_index [BLOCKS] [SERVERS]`."""

from __future__ import annotations

import sys
import time

import numpy as np

from stemma_router.cluster.holdings import Holdings
from stemma_router.events.follower import EventFollower
from stemma_router.kv_events.schema import BlockRemoved, BlockStored

_CHAIN = 128
_BLOCK_SIZE = 64


def resident_bytes() -> int:
    """Return this process's memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def fill(holdings: Holdings, num_blocks: int, num_servers: int) -> list[np.ndarray]:
    """Store chains of blocks, one server after the other; return them."""
    rng = np.random.default_rng(0)
    chains = []
    for number in range(num_blocks // _CHAIN):
        chain = rng.integers(1, 2**63, _CHAIN, dtype=np.uint64)
        told = rng.integers(1, 2**63, _CHAIN, dtype=np.uint64)
        holdings.store(number % num_servers, chain, "GPU", told)
        if number % 97 == 0:
            chains.append(chain)
    return chains


def events_a_second(num_servers: int) -> float:
    """Return how many blocks a second are stored and removed again by events of one server."""
    holdings = Holdings()
    followers = [EventFollower(replica, holdings) for replica in range(num_servers)]
    tokens = list(range(_CHAIN * _BLOCK_SIZE))
    begun, count = time.perf_counter(), 0
    for number in range(200):
        hashes: list[bytes | int] = [number * 1000 + place for place in range(_CHAIN)]
        tokens[0] = number
        stored = BlockStored(hashes, None, tokens, _BLOCK_SIZE, None, "GPU", None)
        removed = [BlockRemoved([one], "GPU") for one in hashes[:64]]
        followers[number % num_servers].take([stored, *removed])
        count += len(hashes) + 64
    return count / (time.perf_counter() - begun)


def main() -> None:
    num_blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    num_servers = int(sys.argv[2]) if len(sys.argv) > 2 else 256
    before = resident_bytes()
    holdings = Holdings()
    begun = time.perf_counter()
    chains = fill(holdings, num_blocks, num_servers)
    filled_s = time.perf_counter() - begun
    print(f"{holdings.num_ids:,} blocks of {num_servers} servers, {holdings.num_evicted} evicted")
    print(f"table: {holdings.num_bytes / holdings.num_ids:.1f} bytes a block and holder")
    print(f"process: {(resident_bytes() - before) / holdings.num_ids:.1f} bytes a block and holder")
    print(f"stored: {num_blocks / filled_s:,.0f} blocks/s, growth included")
    begun = time.perf_counter()
    for chain in chains:
        holdings.depths(chain.tolist(), num_servers)
    print(f"looked up: {1e6 * (time.perf_counter() - begun) / len(chains):.0f} us for {_CHAIN} blocks")
    begun = time.perf_counter()
    holdings.clear(0)
    print(f"cleared: {1e6 * (time.perf_counter() - begun):.0f} us for one server")
    print(f"events: {events_a_second(num_servers):,.0f} blocks/s")


if __name__ == "__main__":
    main()
