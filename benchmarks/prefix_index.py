"""What the prefix indexes cost: `python -m benchmarks.prefix_index [--json FILE] [--quick]`.

Four tables. The first compares a match of a long cached prompt with two limits measured in the same run: a
plain comparison of two Python lists (what any index does at the least, in Python), and `hashlib` alone over
the same bytes (what any hash index does at the least). All times are the best of several runs, on one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from stemma.prefix.hashed import HashIndex
from stemma.prefix.index import PrefixIndex
from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace
from stemma.prefix.radix import RadixIndex
from stemma.types import BlockIds, TokenArray

LONG_PROMPT = 131_072
CHAIN_BLOCKS = 64
SHARED_BLOCKS = 8
BRANCH_EVERY = 512
VOCABULARY = 150_000
INDEXES: dict[str, Callable[[int], PrefixIndex]] = {
    "radix": RadixIndex,
    "hash": lambda block_size: HashIndex(KeySpace("benchmark", "layout", block_size)),
}


@dataclass(frozen=True)
class LongMatch:
    """Time to match a prompt whose every token is cached."""

    what: str
    block_size: int
    num_tokens: int
    ms: float


@dataclass(frozen=True)
class ScalingMatch:
    """Time to match one chain of `CHAIN_BLOCKS` blocks beside many others."""

    what: str
    num_cached_blocks: int
    us: float


@dataclass(frozen=True)
class Memory:
    """Bytes per cached block, the block's tokens included."""

    what: str
    block_size: int
    num_cached_blocks: int
    bytes_per_block: float
    token_bytes_per_block: int


@dataclass(frozen=True)
class Operation:
    """Cost per block of one operation on chains of `CHAIN_BLOCKS` blocks."""

    what: str
    operation: str
    block_size: int
    num_cached_blocks: int
    ns_per_block: float


def best_s(call: Callable[[], object], repeats: int = 7) -> float:
    """Return the shortest time of `repeats` calls, seconds."""
    times: list[float] = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)


def random_tokens(generator: np.random.Generator, num_tokens: int) -> TokenArray:
    return generator.integers(0, VOCABULARY, num_tokens, dtype=np.int32)


def chains(num_blocks: int, block_size: int) -> Iterator[tuple[TokenArray, BlockIds]]:
    """Yield chains whose blocks, shared ones counted once, are `num_blocks` in all.

    Groups of sixteen share their first `SHARED_BLOCKS` blocks, like chats with one system prompt.
    """
    generator = np.random.default_rng(7)
    next_id = 0
    while num_blocks - next_id >= CHAIN_BLOCKS:
        shared = random_tokens(generator, SHARED_BLOCKS * block_size)
        shared_ids = np.arange(next_id, next_id + SHARED_BLOCKS, dtype=np.int32)
        next_id += SHARED_BLOCKS
        for _ in range(16):
            num_own = min(CHAIN_BLOCKS - SHARED_BLOCKS, num_blocks - next_id)
            if num_own <= 0:
                return
            own = random_tokens(generator, num_own * block_size)
            own_ids = np.arange(next_id, next_id + num_own, dtype=np.int32)
            next_id += num_own
            yield np.concatenate((shared, own)), np.concatenate((shared_ids, own_ids))


def fill(index: PrefixIndex, num_blocks: int) -> None:
    for now, (tokens, block_ids) in enumerate(chains(num_blocks, index.block_size)):
        index.insert(DEFAULT_NAMESPACE, tokens, block_ids, float(now))


def hash_alone(tokens: TokenArray, block_size: int) -> bytes:
    """Chain SHA-256 over the blocks, and nothing else."""
    data = memoryview(tokens.tobytes())
    key, stride = bytes(32), 4 * block_size
    for start in range(0, len(data), stride):
        key = sha256(key + data[start : start + stride]).digest()
    return key


def match_ms(index: PrefixIndex, query: TokenArray) -> float:
    return best_s(lambda: index.match(DEFAULT_NAMESPACE, query), 20) * 1e3


def add_branches(index: PrefixIndex, tokens: TokenArray, block_ids: BlockIds) -> None:
    """Insert prompts that part from `tokens` at every `BRANCH_EVERY`-th token."""
    for number, end in enumerate(range(BRANCH_EVERY, len(tokens), BRANCH_EVERY)):
        other = np.concatenate((tokens[:end], tokens[end : end + 1] + 1))
        ids = np.append(block_ids[: end // index.block_size], np.int32(100_000 + number))
        index.insert(DEFAULT_NAMESPACE, other, ids, 1.0)


def long_match(block_size: int) -> list[LongMatch]:
    generator = np.random.default_rng(1)
    tokens = random_tokens(generator, LONG_PROMPT)
    ids = np.arange(LONG_PROMPT // block_size, dtype=np.int32)
    left, right = tokens.tolist(), tokens.copy().tolist()
    rows = [
        LongMatch("two Python lists, ==", block_size, LONG_PROMPT, best_s(lambda: left == right) * 1e3),
        LongMatch(
            "hashlib alone", block_size, LONG_PROMPT, best_s(lambda: hash_alone(tokens, block_size)) * 1e3
        ),
    ]
    for name, make in INDEXES.items():
        index = make(block_size)
        fill(index, 10_000)
        index.insert(DEFAULT_NAMESPACE, tokens, ids + 20_000, 0.0)
        query = tokens.copy()
        assert index.match(DEFAULT_NAMESPACE, query).num_tokens == LONG_PROMPT
        rows.append(LongMatch(name, block_size, LONG_PROMPT, match_ms(index, query)))
        add_branches(index, tokens, ids + 20_000)
        rows.append(
            LongMatch(
                f"{name}, {LONG_PROMPT // BRANCH_EVERY} branches",
                block_size,
                LONG_PROMPT,
                match_ms(index, query),
            )
        )
    return rows


def scaling(sizes: list[int], block_size: int = 16) -> list[ScalingMatch]:
    rows: list[ScalingMatch] = []
    for name, make in INDEXES.items():
        for size in sizes:
            index = make(block_size)
            fill(index, size)
            queries = [tokens for tokens, _ in chains(min(size, 6_000), block_size)]

            def match_all(index: PrefixIndex = index, queries: list[TokenArray] = queries) -> None:
                for query in queries:
                    index.match(DEFAULT_NAMESPACE, query)

            rows.append(ScalingMatch(name, size, best_s(match_all) / len(queries) * 1e6))
            del index
            gc.collect()
    return rows


def memory(num_blocks: int) -> list[Memory]:
    rows: list[Memory] = []
    for name, make in INDEXES.items():
        for block_size in (16, 64):
            gc.collect()
            tracemalloc.start()
            index = make(block_size)
            fill(index, num_blocks)
            gc.collect()
            used, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            rows.append(Memory(name, block_size, num_blocks, used / index.num_blocks, 4 * block_size))
    return rows


def operations(num_blocks: int, block_size: int = 16, repeats: int = 3) -> list[Operation]:
    rows: list[Operation] = []
    work = list(chains(num_blocks, block_size))
    num_uses = sum(len(block_ids) for _, block_ids in work)
    for name, make in INDEXES.items():
        times_s: dict[str, list[float]] = {"insert": [], "touch": [], "evict": []}
        num_cached = 0
        for _ in range(repeats):
            index = make(block_size)
            start = perf_counter()
            for now, (tokens, block_ids) in enumerate(work):
                index.insert(DEFAULT_NAMESPACE, tokens, block_ids, float(now))
            times_s["insert"].append(perf_counter() - start)
            start = perf_counter()
            for _, block_ids in work:
                index.touch(block_ids, 1e9)
            times_s["touch"].append(perf_counter() - start)
            num_cached = index.num_blocks
            start = perf_counter()
            while len(index.evict(CHAIN_BLOCKS, 2e9)):
                pass
            times_s["evict"].append(perf_counter() - start)
        for operation, taken in times_s.items():
            count = num_cached if operation == "evict" else num_uses
            rows.append(Operation(name, operation, block_size, num_cached, min(taken) / count * 1e9))
    return rows


def show(console: Console, title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_long(console: Console, rows: list[LongMatch]) -> None:
    hashlib_ms = {row.block_size: row.ms for row in rows if row.what == "hashlib alone"}
    lists_ms = {row.block_size: row.ms for row in rows if row.what.startswith("two Python")}
    show(
        console,
        f"Match of {LONG_PROMPT:,} cached tokens",
        ["", "block size", "ms", "x hashlib alone", "x list comparison"],
        [
            [
                row.what,
                str(row.block_size),
                f"{row.ms:.3f}",
                f"{row.ms / hashlib_ms[row.block_size]:.2f}",
                f"{row.ms / lists_ms[row.block_size]:.2f}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument("--quick", action="store_true", help="at most 100,000 cached blocks")
    options = parser.parse_args()
    sizes = [10**3, 10**4, 10**5] if options.quick else [10**3, 10**4, 10**5, 10**6]
    console = Console()

    longest = long_match(64) + long_match(16)
    show_long(console, longest)
    by_size = scaling(sizes)
    show(
        console,
        f"Match of a chain of {CHAIN_BLOCKS} blocks of 16, by what else is cached",
        ["", "cached blocks", "us", "x smallest"],
        [
            [
                row.what,
                f"{row.num_cached_blocks:,}",
                f"{row.us:.1f}",
                f"{row.us / next(r.us for r in by_size if r.what == row.what):.2f}",
            ]
            for row in by_size
        ],
    )
    costs = operations(100_000)
    show(
        console,
        "Cost of other operations with LRU, blocks of 16",
        ["", "operation", "cached blocks", "ns per block"],
        [[row.what, row.operation, f"{row.num_cached_blocks:,}", f"{row.ns_per_block:.0f}"] for row in costs],
    )
    sizes_bytes = memory(100_000)
    show(
        console,
        "Memory per cached block",
        ["", "block size", "bytes", "of which tokens"],
        [
            [row.what, str(row.block_size), f"{row.bytes_per_block:.0f}", str(row.token_bytes_per_block)]
            for row in sizes_bytes
        ],
    )
    if options.json is not None:
        rows: dict[str, list[dict[str, object]]] = {
            "long_match": [asdict(row) for row in longest],
            "scaling": [asdict(row) for row in by_size],
            "operations": [asdict(row) for row in costs],
            "memory": [asdict(row) for row in sizes_bytes],
        }
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
