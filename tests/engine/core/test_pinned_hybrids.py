"""Pins of models with recurrent layers and with windows hold what a prompt goes on from, not its KV alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests import hybrids
from tests.engine.generating import collect, request
from tests.engine.harness import greedy, prompt

from stemma.engine.async_engine import AsyncEngine
from stemma.engine.llm import engine_settings
from stemma.prefix.keys import DEFAULT_NAMESPACE


@pytest.mark.parametrize(("family", "memory"), [("qwen3_next", "1MB"), ("gemma3_text", "2MB")])
async def test_a_pinned_prompt_is_still_a_hit_when_others_took_the_room(
    family: str, memory: str, tmp_path: Path
) -> None:
    path = hybrids.build(family, tmp_path / "model")
    settings = engine_settings(path, kv_cache_memory=memory, block_size=16, max_batch_tokens=64)
    engine = AsyncEngine.from_settings(settings)
    try:
        tokens = prompt(1, 200)
        await collect(engine, request("pinned", tokens, greedy(1)))
        pin = await engine.cache_control.pin(DEFAULT_NAMESPACE, tokens)
        for number in range(40):
            await collect(engine, request(f"other {number}", prompt(10 + number, 300), greedy(1)))
        early = np.concatenate([prompt(10, 300), prompt(4, 20)])
        outputs = await collect(engine, request("pushed out", early, greedy(1)))
        assert outputs[-1].cache.num_cached_tokens == 0
        outputs = await collect(engine, request("again", np.concatenate([tokens, prompt(2, 40)]), greedy(1)))
        assert outputs[-1].cache.num_cached_tokens == 192
        await engine.cache_control.flush()
        outputs = await collect(
            engine, request("flushed", np.concatenate([tokens, prompt(3, 40)]), greedy(1))
        )
        assert outputs[-1].cache.num_cached_tokens == 192
        await engine.cache_control.unpin(pin.pin_id)
        await engine.check()
    finally:
        engine.close()
