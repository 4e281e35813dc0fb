"""KV as codes or in pieces through the engine: what every tier holds, never taken for KV of another kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stemma.config.settings import KVDtype, ModelSettings
from stemma.engine.llm import LLM
from stemma.engine.offline import Generation
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import ConfigError
from stemma.memory.tiers.pool.envelope import HEADER_BYTES
from stemma.model.load.loading import load_model
from stemma.types import Tier
from tests.checkpoints import build
from tests.engine.harness import prompt

BLOCK_SIZE = 16
TIMEOUT_S = 30.0
PROMPTS = [prompt(seed, 100).tolist() for seed in range(4)]
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64."""
    return build("qwen2", tmp_path_factory.mktemp("codes") / "qwen2", hidden_size=256)


@contextmanager
def engine(path: Path, kv_dtype: KVDtype, **settings: Any) -> Iterator[LLM]:
    defaults = {"dtype": "bfloat16", "block_size": BLOCK_SIZE, "load_when": "always", "num_threads": 1}
    defaults["kv_cache_memory"] = "8MB"
    llm = LLM(path, device="cpu", kv_cache_dtype=kv_dtype, **(defaults | settings))
    try:
        yield llm
    finally:
        llm.close()


def serve(llm: LLM) -> list[Generation]:
    generations = [llm.generate(tokens, PARAMS)[0] for tokens in PROMPTS]
    assert llm.engine.cache.below.drain(TIMEOUT_S)
    return generations


def cached(generations: list[Generation], tier: Tier) -> list[int]:
    return [one.cache.cached_by_tier.get(tier, 0) for one in generations]


def answers(generations: list[Generation]) -> list[Any]:
    return [(one.completions[0].token_ids, one.completions[0].logprobs) for one in generations]


def pool_settings(folder: Path) -> dict[str, Any]:
    config = folder / "pool.json"
    config.write_text(json.dumps({"path": str(folder / "pool")}))
    return {"pool": "directory", "pool_config": str(config)}


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_tiers_hold_almost_twice_the_tokens(checkpoint: Path, kv_dtype: KVDtype, tmp_path: Path) -> None:
    blocks: dict[str, list[int]] = {}
    values: dict[str, int] = {}
    for dtype in ("auto", kv_dtype):
        folder = tmp_path / dtype
        folder.mkdir()
        tiers = {"host_cache": "4MB", "disk_cache": str(folder / "disk"), "disk_cache_size": "40MB"}
        with engine(checkpoint, dtype, **tiers, **pool_settings(folder)) as llm:
            stores = llm.engine.cache.below.stores[:2]
            blocks[dtype] = [llm.engine.cache.num_blocks, *(store.capacity_blocks or 0 for store in stores)]
            serve(llm)
        sizes = {file.stat().st_size for file in (folder / "pool").rglob("*") if file.is_file()}
        values[dtype] = max(sizes) - HEADER_BYTES
    for plain, coded in zip(blocks["auto"], blocks[kv_dtype], strict=True):
        assert coded / plain > 1.85
    assert values["auto"] / values[kv_dtype] == 128 / 66


def test_a_restart_finds_the_codes_on_disk(checkpoint: Path, tmp_path: Path) -> None:
    disk = {"disk_cache": str(tmp_path), "disk_cache_size": "40MB"}
    with engine(checkpoint, "int8", **disk) as llm:
        first = serve(llm)
    with engine(checkpoint, "int8", **disk) as llm:
        again = serve(llm)
    assert cached(again, Tier.DISK) == [96] * 4
    assert answers(again) == answers(first)


def test_another_dtype_misses_in_disk_and_pool(checkpoint: Path, tmp_path: Path) -> None:
    """All read and write one directory and one pool; each finds its own blocks alone."""
    shared = {"disk_cache": str(tmp_path / "disk"), "disk_cache_size": "40MB", **pool_settings(tmp_path)}
    dtypes: tuple[KVDtype, ...] = ("auto", "int8", "fp8")
    expected = {}
    for dtype in dtypes:
        with engine(checkpoint, dtype, **shared) as llm:
            cold = serve(llm)
            assert [one.cache.num_cached_tokens for one in cold] == [0] * 4
            assert llm.engine.stats().misses_by_reason == {cold[0].cache.miss_reason: 4}
            expected[dtype] = answers(cold)
    assert len({repr(found) for found in expected.values()}) == 3
    for dtype in dtypes:
        with engine(checkpoint, dtype, **pool_settings(tmp_path)) as llm:
            warm = serve(llm)
            assert cached(warm, Tier.POOL) == [96] * 4
            assert answers(warm) == expected[dtype]


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("deepseek-v3", tmp_path_factory.mktemp("latents") / "deepseek-v3")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_another_layout_misses_in_disk_and_pool(latents: Path, kv_dtype: KVDtype, tmp_path: Path) -> None:
    """Both layouts read and write one directory and one pool; answers are equal to the bit."""
    disk, pool = {"disk_cache": str(tmp_path / "disk"), "disk_cache_size": "80MB"}, pool_settings(tmp_path)
    found = []
    for layout in ("rows", "nz"):
        with engine(latents, kv_dtype, kv_layout=layout, **disk, **pool) as llm:
            cold = serve(llm)
            assert [one.cache.num_cached_tokens for one in cold] == [0] * 4
            found.append(answers(cold))
    # The disk's size holds one model's files, so those of the first are gone.
    for tier, layout in ((Tier.DISK, "nz"), (Tier.POOL, "nz"), (Tier.POOL, "rows")):
        with engine(latents, kv_dtype, kv_layout=layout, **(disk if tier is Tier.DISK else pool)) as llm:
            warm = serve(llm)
            assert cached(warm, tier) == [96] * 4
            found.append(answers(warm))
    assert len({repr(one) for one in found}) == 1


def test_other_devices_than_cpu_refuse_tiles(checkpoint: Path) -> None:
    model = load_model(ModelSettings(path=checkpoint, device="cpu"))
    elsewhere = replace(model.kept, device="cuda")
    assert elsewhere.layout(BLOCK_SIZE) == model.layout(BLOCK_SIZE)
    tiles = "kv_layout nz .* caches keys and values of each head"
    with pytest.raises(ConfigError, match=tiles):
        elsewhere.layout(BLOCK_SIZE, arrangement="nz")
