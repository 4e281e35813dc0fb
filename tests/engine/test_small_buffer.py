"""Blocks that are large for the transfer buffer come back after a restart, all of them."""

from __future__ import annotations

from pathlib import Path

from stemma import LLM, SamplingParams

BLOCK_SIZE = 16
PROMPT = [5 + number % 90 for number in range(40 * BLOCK_SIZE + 3)]


def cached_after(checkpoint: Path, disk: Path) -> int:
    """Return how many tokens of the prompt are found on the disk by a new process's engine."""
    llm = LLM(checkpoint, block_size=BLOCK_SIZE, disk_cache=disk, load_when="always", transfer_buffer="4KB")
    [result] = llm.generate(PROMPT, SamplingParams(max_tokens=2))
    llm.close()
    return result.cache.num_cached_tokens


def test_what_a_step_commits_beyond_the_buffer_is_written(checkpoint: Path, tmp_path: Path) -> None:
    """The buffer holds its least, four blocks; a step commits forty."""
    assert cached_after(checkpoint, tmp_path) == 0
    assert cached_after(checkpoint, tmp_path) == 40 * BLOCK_SIZE
