"""The longest context of one process and of context parallel ranks with the same KV memory each.

``python -m benchmarks.context_parallel [MODEL]``: an engine of one process and one of two, each process with
48 MB for KV, two cores in all. A row: tokens of the longest prompt that is answered with 17 more, seconds
that it takes uncached, milliseconds of a decode step behind it, and the resident memory of each process at
its peak. The last line is the ratio of the longest prompts; goal: the number of ranks.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from stemma import LLM, SamplingParams
from stemma.errors import PromptTooLong

KV_MEMORY, BLOCK_SIZE, DECODED = "48MB", 32, 17


def peak_mb(process: int) -> int:
    """Return the largest resident memory that a process has had, in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1000


def children() -> list[int]:
    """Return the processes that this one has started, in order."""
    tasks = Path("/proc/self/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def measure(model: str, ranks: int) -> int:
    """Print a row; return the tokens of the longest prompt."""
    llm = LLM(
        model,
        context_parallel_size=ranks,
        kv_cache_memory=KV_MEMORY,
        block_size=BLOCK_SIZE,
        num_threads=2 // ranks,
        speculation="off",
    )
    longest = llm.engine.cache.capacity_tokens - DECODED
    prompt = [(11 * i * i + 5 * i) % 20_000 + 100 for i in range(longest + DECODED)]
    one, more = (SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, DECODED))
    try:
        llm.generate(prompt, one)
        raise AssertionError("a prompt was answered that doesn't fit")
    except PromptTooLong:
        pass
    begin = time.perf_counter()
    uncached = llm.generate(prompt[:longest], one)[0]
    assert uncached.cache.num_cached_tokens == 0
    seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    llm.generate(prompt[:longest], more)
    step_ms = (time.perf_counter() - begin) / DECODED * 1e3
    memory = ", ".join(f"{peak_mb(process)} MB" for process in [os.getpid(), *children()])
    print(
        f"{ranks} x {KV_MEMORY}: {longest} tokens, {seconds:.1f} s, {step_ms:.0f} ms a token; peak {memory}"
    )
    llm.close()
    return longest


def main() -> None:
    """Measure one process and two."""
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    one, two = measure(model, 1), measure(model, 2)
    print(f"longest context, two ranks to one process: {two / one:.2f}")


if __name__ == "__main__":
    main()
