"""Models with recurrent layers and windows go on from what idle time prepared, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import hybrids
from tests.engine.generating import collect, request
from tests.engine.harness import greedy, prompt

from stemma.engine.api import RequestOutput
from stemma.engine.async_engine import AsyncEngine
from stemma.engine.llm import engine_settings

KNOWN, NEXT, LONGER = prompt(1, 64), prompt(1, 160), prompt(1, 190)


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [int(each) for output in outputs for delta in output.deltas for each in delta.token_ids]


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text"])
async def test_a_prompt_goes_on_from_a_prepared_one(family: str, tmp_path: Path) -> None:
    path = hybrids.build(family, tmp_path / "model")
    settings = engine_settings(path, kv_cache_memory="4MB", block_size=16, max_batch_tokens=64)
    engine, fresh = AsyncEngine.from_settings(settings), AsyncEngine.from_settings(settings)
    try:
        await collect(engine, request("known", KNOWN, greedy(1)))
        prepared = await engine.prepare(request("next", NEXT, greedy(1)), 1000)
        assert (prepared.num_tokens, prepared.was_cut) == (len(NEXT), False)
        outputs = await collect(engine, request("longer", LONGER, greedy(8)))
        assert outputs[-1].cache.num_cached_tokens >= 128  # its deepest checkpoint: two blocks before its end
        expected = await collect(fresh, request("longer", LONGER, greedy(8)))
        assert ids_of(outputs) == ids_of(expected)
        await engine.check()
    finally:
        engine.close()
        fresh.close()
