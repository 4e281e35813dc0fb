"""Tiers that keep blocks packed give the answers of an engine without any cache, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stemma.engine.llm import LLM
from stemma.engine.offline import Generation
from stemma.engine.sampling.params import SamplingParams
from stemma.types import Tier
from tests.checkpoints import build
from tests.engine.harness import prompt
from tests.hybrids import build as build_hybrid

TIMEOUT_S = 30.0
BLOCK_SIZE = 128
"""Of these tiny models: a block of less than 64 KiB isn't packed."""
PROMPTS = [prompt(seed, 600).tolist() for seed in range(4)]
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)

MODELS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda path: build("qwen3", path, num_key_value_heads=4, head_dim=64),
    "windows": lambda path: build("gemma3", path, head_dim=128),
    "latents": lambda path: build("deepseek-v3", path, num_hidden_layers=8),
    "states": lambda path: build_hybrid("qwen3_next", path, head_dim=128),
}


@contextmanager
def engine(path: Path, folder: Path, packs: str, **settings: Any) -> Iterator[LLM]:
    defaults = {"dtype": "bfloat16", "block_size": BLOCK_SIZE, "load_when": "always", "num_threads": 1}
    tiers = {"disk_cache": str(folder / "disk"), "disk_cache_size": "400MB", "tier_compression": packs}
    llm = LLM(path, device="cpu", **(defaults | tiers | settings))
    try:
        yield llm
    finally:
        llm.close()


def serve(llm: LLM) -> list[Generation]:
    generations = [llm.generate(tokens, PARAMS)[0] for tokens in PROMPTS]
    assert llm.engine.cache.below.drain(TIMEOUT_S)
    return generations


def answers(generations: list[Generation]) -> list[Any]:
    return [(one.completions[0].token_ids, one.completions[0].logprobs) for one in generations]


def hits(generations: list[Generation], tier: Tier) -> list[int]:
    return [one.cache.cached_by_tier.get(tier, 0) for one in generations]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("packed") / request.param)


def test_packed_blocks_of_disk_and_pool_give_the_same_answers(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path, "off", enable_prefix_cache=False, disk_cache=None) as llm:
        expected = answers(serve(llm))
    config = tmp_path / "pool.json"
    config.write_text(json.dumps({"path": str(tmp_path / "pool")}))
    pool = {"pool": "directory", "pool_config": str(config)}
    with engine(model, tmp_path, "auto", **pool) as llm:
        assert answers(serve(llm)) == expected
        stats = llm.engine.stats().transfer
        assert stats is not None
        on_disk = stats.tiers[Tier.DISK]
        assert on_disk.num_blocks
        assert on_disk.stored_bytes
        assert on_disk.stored_bytes < on_disk.num_blocks * on_disk.block_bytes
    for setting in ("auto", "off"):  # what packs and what doesn't read each other's blocks
        with engine(model, tmp_path, setting) as llm:
            again = serve(llm)
            assert all(hits(again, Tier.DISK))
            assert answers(again) == expected
        with engine(model, tmp_path, setting, disk_cache=None, **pool) as llm:
            again = serve(llm)
            assert all(hits(again, Tier.POOL))
            assert answers(again) == expected


def test_packed_blocks_of_the_host_give_the_same_answers(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path, "off", enable_prefix_cache=False, disk_cache=None) as llm:
        expected = answers(serve(llm))
    device = "700kB" if model.name == "latents" else "2MB"
    with engine(model, tmp_path, "auto", host_cache="64MB", kv_cache_memory=device, disk_cache=None) as llm:
        for _ in range(3):
            again = serve(llm)
            assert answers(again) == expected
        assert any(hits(again, Tier.HOST))
