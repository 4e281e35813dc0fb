"""Two ranks and a pool: each keeps its part there; what one of them has lost or finds damaged is computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stemma import LLM, SamplingParams
from stemma.config.loading import load_settings
from stemma.config.settings import PoolSettings
from stemma.engine.api import GenerationRequest
from stemma.engine.async_engine import AsyncEngine
from stemma.engine.offline import Generation
from stemma.errors import ConfigError, StemmaError
from stemma.prefix.keys import Namespace
from stemma.types import Tier
from tests.checkpoints import build
from tests.engine.ranks.checks import (
    GREEDY,
    LONG,
    OTHER,
    SMALL,
    TIERS,
    bits,
    directory_pool,
    in_one_process,
    tokens,
)
from tests.memory.tiers.pool.servers import MooncakeMaster, RedisServer

RANKS: dict[str, Any] = {"tensor_parallel_size": 2}


def after_flush(llm: LLM) -> Generation:
    """Answer a prompt that no tier of the engine has, the pool perhaps."""
    assert llm.engine.cache.below.drain(20.0)
    llm.engine.cache.flush()
    llm.engine.cache.below.flush()
    return llm.generate(LONG, GREEDY)[0]


def missing(llm: LLM) -> dict[int, int]:
    transfer = llm.stats().transfer
    assert transfer is not None
    return dict(transfer.missing_by_rank)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooled")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    checkpoint = build("llama", folder / "model")
    llm = LLM(checkpoint, **(SMALL | TIERS | RANKS | directory_pool(folder)))
    yield llm
    llm.close()


@pytest.mark.slow
def test_what_the_pool_gives_back_has_the_same_bits(llm: LLM, folder: Path) -> None:
    uncached = llm.generate(LONG, GREEDY, namespace=Namespace(salt="nobody's"))[0]
    first = llm.generate(LONG, GREEDY)[0]
    found = after_flush(llm)
    assert found.cache.cached_by_tier == {Tier.POOL: 64}
    assert bits(found) == bits(first) == bits(uncached)
    names = {file.name.split("_", 1)[1] for file in (folder / "pool").rglob("*_*_2_*")}
    assert {name[:3] for name in names} == {"0_2", "1_2"}
    assert missing(llm) == {0: 0, 1: 0}
    llm.engine.check()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["lost", "damaged"])
def test_what_one_rank_cannot_read_is_computed(llm: LLM, folder: Path, fault: str, rank: int) -> None:
    whole = after_flush(llm)
    keys = llm.engine.cache.key_space.roots(Namespace()).chain(np.asarray(LONG, dtype=np.int32))
    [file] = (folder / "pool").rglob(f"{keys[4].hex()}_{rank}_2_*")
    if fault == "lost":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    before = missing(llm)
    found = after_flush(llm)
    assert found.cache.cached_by_tier == {Tier.POOL: 32}
    assert bits(found) == bits(whole)
    assert missing(llm)[rank] > before[rank]
    assert missing(llm)[1 - rank] == before[1 - rank]
    again = after_flush(llm)  # what was computed is in the pool again
    assert again.cache.cached_by_tier == {Tier.POOL: 64}
    assert bits(again) == bits(whole)
    llm.engine.check()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"context_parallel_size": 2}, RANKS | {"context_parallel_size": 2}])
def test_tokens_of_several_ranks_come_back_from_the_pool(ranks: dict[str, int], tmp_path: Path) -> None:
    llm = LLM(build("llama", tmp_path / "model"), **(SMALL | TIERS | ranks | directory_pool(tmp_path)))
    first = llm.generate(LONG, GREEDY)[0]
    found = after_flush(llm)
    assert found.cache.cached_by_tier == {Tier.POOL: 64}
    assert bits(found) == bits(first)
    size = len(missing(llm))
    keys = llm.engine.cache.key_space.roots(Namespace()).chain(np.asarray(LONG, dtype=np.int32))
    [file] = (tmp_path / "pool").rglob(f"{keys[4].hex()}_{size - 1}_{size}_*")
    file.unlink()
    found = after_flush(llm)
    assert found.cache.cached_by_tier == {Tier.POOL: 32}
    assert bits(found) == bits(first)
    assert missing(llm)[size - 1] > 0
    llm.engine.check()
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size", "expert_size", "context_size"),
    [
        ("llama", 2, 1, 1),
        ("qwen3-moe", 2, 2, 1),
        ("deepseek-v3", 4, 2, 1),
        ("gemma2", 2, 1, 1),
        ("llama", 1, 1, 2),
        ("deepseek-v3", 2, 1, 2),
    ],
)
def test_prefill_and_decode_on_ranks_of_their_own(
    family: str, size: int, expert_size: int, context_size: int, tmp_path: Path
) -> None:
    checkpoint = build(family, tmp_path / "model", num_key_value_heads=4)
    expected = in_one_process(checkpoint)
    settings = SMALL | TIERS | directory_pool(tmp_path)
    settings |= {"tensor_parallel_size": size, "expert_parallel_size": expert_size}
    settings |= {"context_parallel_size": context_size}
    prefill = LLM(checkpoint, role="prefill", **settings)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    begun = [tokens(found) for found in prefill.generate([LONG, OTHER], one)]
    assert prefill.engine.cache.below.drain(20.0)
    decode = LLM(checkpoint, role="decode", enable_prefix_cache=False, **settings)
    for _ in range(2):
        found = decode.generate([LONG, OTHER], GREEDY)
        assert [tokens(one) for one in found] == expected
        assert [one.cache.cached_by_tier for one in found] == [{Tier.POOL: 69}, {Tier.POOL: 74}]
    assert [one[:1] for one in expected] == begun
    whole = prefill.generate(LONG, GREEDY, namespace=Namespace(salt="nobody's"))[0]
    assert bits(whole) == bits(found[0])
    assert missing(decode) == dict.fromkeys(range(size * context_size), 0)
    for llm in (prefill, decode):
        llm.engine.check()
        llm.close()


@pytest.mark.slow
def test_kv_of_another_number_of_ranks_is_never_taken(tmp_path: Path) -> None:
    checkpoint = build("llama", tmp_path / "model")
    settings = SMALL | TIERS | directory_pool(tmp_path)
    for ranks in ({}, RANKS, {}, RANKS):
        is_first = not list((tmp_path / "pool").rglob(f"*_0_{2 if ranks else 1}_*"))
        llm = LLM(checkpoint, **(settings | ranks))
        found = llm.generate(LONG, GREEDY)[0]
        assert found.cache.num_cached_tokens == (0 if is_first else 64)
        llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "mooncake"])
def test_pools_of_servers(kind: str, tmp_path: Path) -> None:
    server = RedisServer(tmp_path) if kind == "redis" else MooncakeMaster()
    config = {"url": server.url} if isinstance(server, RedisServer) else server.config()
    (tmp_path / "pool.json").write_text(json.dumps(config))
    pool = {"pool": kind, "pool_config": tmp_path / "pool.json"}
    llm = LLM(build("llama", tmp_path / "model"), **(SMALL | TIERS | RANKS | pool))
    try:
        first = llm.generate(LONG, GREEDY)[0]
        found = after_flush(llm)
        assert found.cache.cached_by_tier == {Tier.POOL: 64}
        assert bits(found) == bits(first)
        server.stop()  # a miss on all ranks, and no error
        found = after_flush(llm)
        assert found.cache.num_cached_tokens == 0
        assert bits(found) == bits(first)
    finally:
        llm.close()
        server.stop()


@pytest.mark.slow
async def test_a_pool_is_attached_to_and_detached_from_all_ranks(tmp_path: Path) -> None:
    checkpoint = build("llama", tmp_path / "model")
    settings = load_settings(flags={"model": checkpoint, **SMALL, **TIERS, **RANKS}).engine
    engine = AsyncEngine.from_settings(settings)
    pool = PoolSettings(name="directory", config=directory_pool(tmp_path)["pool_config"])

    async def answer(name: str) -> tuple[list[int], int]:
        request = GenerationRequest(name, np.asarray(LONG, dtype=np.int32), GREEDY)
        outputs = [output async for output in engine.generate(request)]
        await engine.cache_control.flush()
        ids = [one for output in outputs for part in output.deltas for one in part.token_ids]
        return ids, outputs[-1].cache.num_cached_tokens

    try:
        before = await answer("before")
        await engine.attach_pool(pool)
        with pytest.raises(ConfigError, match="there is a pool already"):
            await engine.attach_pool(pool)
        found = [await answer(name) for name in ("written", "read")]
        assert [ids for ids, _ in found] == [before[0]] * 2
        assert [num for _, num in found] == [0, 64]
        assert await engine.detach_pool()
        assert not await engine.detach_pool()
        assert await answer("after") == before
        (tmp_path / "pool.json").write_text("{}")
        with pytest.raises(StemmaError, match="path"):
            await engine.attach_pool(pool)
        await engine.check()
    finally:
        engine.close()
