"""Exported prefixes of models with recurrent layers and windows carry what a prompt goes on from."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import hybrids
from tests.engine.generating import collect, request
from tests.engine.harness import greedy, prompt

from stemma.engine.api import RequestOutput
from stemma.engine.async_engine import AsyncEngine
from stemma.engine.llm import engine_settings
from stemma.errors import StorageError
from stemma.memory.tiers.bundle import BundleTrust
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.types import Tier

ANY = BundleTrust(takes_unsigned=True)
TOKENS = prompt(1, 200)
LONGER = np.concatenate([TOKENS, prompt(2, 40)])


def engine_of(path: Path, **settings: Any) -> AsyncEngine:
    fields = {"kv_cache_memory": "4MB", "block_size": 16, "max_batch_tokens": 64} | settings
    return AsyncEngine.from_settings(engine_settings(path, **fields))


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [int(each) for output in outputs for delta in output.deltas for each in delta.token_ids]


async def exported(engine: AsyncEngine) -> bytes:
    await collect(engine, request("first", TOKENS, greedy(1)))
    file = io.BytesIO()
    assert await engine.cache_control.export(DEFAULT_NAMESPACE, TOKENS, file) == 12
    return file.getvalue()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text", "mamba2", "deepseek_v32"])
async def test_a_prompt_goes_on_from_an_imported_prefix(family: str, tmp_path: Path) -> None:
    path = hybrids.build(family, tmp_path / "model")
    source, target = engine_of(path), engine_of(path)
    try:
        content = await exported(source)
        expected = await collect(source, request("longer", LONGER, greedy(8)))
        _, num_new = await target.cache_control.import_(
            lambda _tokens: DEFAULT_NAMESPACE, io.BytesIO(content), ANY
        )
        assert num_new == 12
        outputs = await collect(target, request("longer", LONGER, greedy(8)))
        assert outputs[-1].cache.num_cached_tokens == 192
        assert ids_of(outputs) == ids_of(expected)
        _, again = await target.cache_control.import_(
            lambda _tokens: DEFAULT_NAMESPACE, io.BytesIO(content), ANY
        )
        assert again == 0
        await target.check()
    finally:
        source.close()
        target.close()


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text"])
async def test_what_was_imported_goes_to_lower_tiers(family: str, tmp_path: Path) -> None:
    path = hybrids.build(family, tmp_path / "model")
    source, target = (
        engine_of(path),
        engine_of(
            path,
            kv_cache_memory="1MB",
            host_cache="100MB",
            load_when="always",
            host_write="write_through",
        ),
    )
    try:
        content = await exported(source)
        await target.cache_control.import_(lambda _tokens: DEFAULT_NAMESPACE, io.BytesIO(content), ANY)
        assert await target.cache_control.drain(10.0)
        for number in range(10):  # the device has no room for all
            await collect(target, request(f"other {number}", prompt(10 + number, 600), greedy(1)))
        outputs = await collect(target, request("longer", LONGER, greedy(8)))
        assert outputs[-1].cache.cached_by_tier == {Tier.HOST: 192}
        expected = await collect(source, request("longer", LONGER, greedy(8)))
        assert ids_of(outputs) == ids_of(expected)
    finally:
        source.close()
        target.close()


async def test_a_damaged_checkpoint_isnt_taken(tmp_path: Path) -> None:
    path = hybrids.build("qwen3_next", tmp_path / "model")
    source, target = engine_of(path), engine_of(path)
    try:
        content = bytearray(await exported(source))
        content[-5] ^= 1
        with pytest.raises(StorageError, match="fails its checksum"):
            await target.cache_control.import_(
                lambda _tokens: DEFAULT_NAMESPACE, io.BytesIO(bytes(content)), ANY
            )
        outputs = await collect(target, request("longer", LONGER, greedy(8)))
        assert outputs[-1].cache.num_cached_tokens == 0
        assert outputs[-1].cache.miss_reason == "no_state"
        await target.check()
    finally:
        source.close()
        target.close()
