"""The engine on a device that isn't CUDA's: torch's PrivateUse1 under another name, number 1 of two.

All goes through the seam: no kernel of ours runs there, and no line of ours names the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import ConfigError
from stemma.memory.device.accelerator import resolve_device
from stemma.types import Tier
from tests import python_device
from tests.checkpoints import build

DEVICE = f"{python_device.NAME}:1"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + (7 * seed + 3 * n) % 200 for n in range(length)] for seed, length in enumerate((90, 33, 7))]


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with python_device.registered():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "qwen2"
    build("qwen2", path)
    return path


def answers(path: Path, rounds: int = 1, **settings: Any) -> tuple[list[list[list[int]]], LLM]:
    options = {"dtype": "float32", "kv_cache_memory": "16MB", "block_size": 16, "speculation": "off"}
    llm = LLM(path, **(options | settings))
    try:
        found = [
            [one.completions[0].token_ids for one in llm.generate(PROMPTS, GREEDY)] for _ in range(rounds)
        ]
        llm.engine.check()
    finally:
        llm.close()
    return found, llm


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_answers_equal_those_of_the_cpu(checkpoint: Path, overlap: str) -> None:
    """Cold and from the cache; every operation was launched on the model's device, by its number."""
    [expected], _ = answers(checkpoint)
    python_device.LAUNCHES.clear()
    found, llm = answers(checkpoint, 2, device=DEVICE, overlap_schedule=overlap)
    assert found == [expected, expected]
    assert set(python_device.LAUNCHES) == {(1, 1)}
    assert llm.engine.stats().cached_tokens_by_tier[Tier.DEVICE] > 0


def test_blocks_go_down_and_come_back(checkpoint: Path) -> None:
    """Copies run in streams of the device, and the loader's thread has it as its current one."""
    [expected], cpu = answers(checkpoint)
    block_bytes = cpu.engine.runner.kv.layout.block_bytes
    python_device.LAUNCHES.clear()
    tiers = {"kv_cache_memory": 9 * block_bytes, "host_cache": "8MB", "load_when": "always"}
    found, llm = answers(checkpoint, 3, device=DEVICE, **tiers)
    assert found == [expected] * 3
    assert set(python_device.LAUNCHES) == {(1, 1)}
    assert llm.engine.stats().cached_tokens_by_tier[Tier.HOST] > 0


def test_a_device_that_lacks_something_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delattr(torch.get_device_module(python_device.NAME), "mem_get_info")
    with pytest.raises(ConfigError, match="has no mem_get_info"):
        resolve_device(python_device.NAME)


def test_a_number_that_there_isnt_is_refused() -> None:
    with pytest.raises(ConfigError, match="finds 2, counted from 0"):
        resolve_device(f"{python_device.NAME}:2")
