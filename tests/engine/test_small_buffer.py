"""Blocks that are large for the transfer buffer come back after a restart, all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from stemma import LLM, SamplingParams
from tests import hybrids

BLOCK_SIZE = 16
PROMPT = [5 + number % 90 for number in range(40 * BLOCK_SIZE + 3)]


def answered(checkpoint: Path, disk: Path) -> tuple[int, list[int]]:
    """Return how many tokens of the prompt a new engine finds on the disk, and its answer."""
    llm = LLM(checkpoint, block_size=BLOCK_SIZE, disk_cache=disk, load_when="always", transfer_buffer="4KB")
    [result] = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    llm.close()
    return result.cache.num_cached_tokens, list(result.completions[0].token_ids)


def test_what_a_step_commits_beyond_the_buffer_is_written(checkpoint: Path, tmp_path: Path) -> None:
    """The buffer holds its least, four blocks; a step commits forty."""
    first = answered(checkpoint, tmp_path)
    assert first[0] == 0
    assert answered(checkpoint, tmp_path) == (40 * BLOCK_SIZE, first[1])


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_so_are_states_and_pages(family: str, tmp_path: Path) -> None:
    path = hybrids.build(family, tmp_path / "model")
    first = answered(path, tmp_path / "disk")
    found, answer = answered(path, tmp_path / "disk")
    assert found >= 32 * BLOCK_SIZE
    assert answer == first[1]
