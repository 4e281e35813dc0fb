"""What is asked of an engine on several processes, however they divide the work."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stemma import LLM, SamplingParams
from stemma.engine.offline import Generation
from stemma.errors import EngineFailed, StemmaError
from stemma.prefix.keys import Namespace
from stemma.types import Tier
from tests.engine.ranks.processes import rank_processes

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
LONG = [(11 * i * i + 5 * i) % 400 + 3 for i in range(70)]
OTHER = [(7 * i * i + 3 * i) % 400 + 3 for i in range(75)]
SMALL: dict[str, Any] = {"block_size": 8, "num_threads": 1, "kv_cache_memory": "2MB"}
TIERS: dict[str, Any] = {"disk_cache_size": "20MB", "load_when": "always", "load_timeout_s": 20.0}


def tokens(found: Generation) -> list[int]:
    return found.completions[0].token_ids


def bits(found: Generation) -> list[tuple[int, float]]:
    return [(one.token_id, one.logprob) for one in found.completions[0].logprobs]


def in_one_process(checkpoint: Path, **settings: Any) -> list[list[int]]:
    llm = LLM(checkpoint, **(SMALL | settings))
    try:
        return [tokens(found) for found in llm.generate([LONG, OTHER], GREEDY)]
    finally:
        llm.close()


def check_other_tiers(llm: LLM) -> None:
    """What left the device comes back on all ranks."""
    expected = bits(llm.generate(LONG, GREEDY)[0])
    for salt in "ab":  # each takes most of the device tier
        llm.generate([LONG, OTHER], GREEDY, namespace=Namespace(salt=salt))
    found = llm.generate(LONG, GREEDY)[0]
    assert found.cache.cached_by_tier[Tier.HOST] > 0
    assert found.cache.num_cached_tokens >= 64
    assert bits(found) == expected
    llm.engine.check()


def check_shared_prompt(llm: LLM) -> None:
    """Answers share their prompt."""
    params = SamplingParams(n=3, max_tokens=4, temperature=0.0, ignore_eos=True)
    answers = llm.generate(LONG, params)[0].completions
    assert len({tuple(one.token_ids) for one in answers}) == 1
    assert llm.beam_search(LONG, 2, 3, ignore_eos=True)[0].completions[0].token_ids
    llm.engine.check()


def check_death(llm: LLM, start: Callable[[], LLM]) -> None:
    """A rank that dies ends the engine, and a restart is warm."""
    expected = bits(llm.generate(LONG, GREEDY)[0])
    assert llm.engine.cache.below.drain(20.0)
    [process] = rank_processes(os.getpid())
    os.kill(process, signal.SIGKILL)
    reason = rf"rank 1 \(process {process}\) was ended by SIGKILL"
    with pytest.raises(StemmaError, match=reason):
        llm.generate(OTHER, GREEDY)
    with pytest.raises(EngineFailed, match=reason):
        llm.generate(OTHER, GREEDY)
    llm.close()
    assert rank_processes(os.getpid()) == []

    again = start()
    found = again.generate(LONG, GREEDY)[0]
    assert found.cache.cached_by_tier == {Tier.DISK: 64}
    assert bits(found) == expected
    transfer = again.stats().transfer
    assert transfer is not None
    assert transfer.missing_by_rank == {0: 0, 1: 0}
    again.close()


def check_lost_disk(checkpoint: Path, folder: Path, ranks: dict[str, int]) -> None:
    """One of two ranks has lost its disk."""
    settings = SMALL | TIERS | ranks | {"disk_cache": folder}
    llm = LLM(checkpoint, **settings)
    expected = bits(llm.generate(LONG, GREEDY)[0])
    llm.close()
    [theirs] = folder.glob("rank-1-of-2")
    shutil.rmtree(theirs)
    for num_cached, missing in ((0, 8), (64, 0)):  # what is computed again is whole again
        llm = LLM(checkpoint, **settings)
        found = llm.generate(LONG, GREEDY)[0]
        assert found.cache.num_cached_tokens == num_cached
        assert bits(found) == expected
        transfer = llm.stats().transfer
        assert transfer is not None
        assert transfer.missing_by_rank == {0: 0, 1: missing}
        llm.engine.check()
        llm.close()


def directory_pool(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "pool.json"
    config.write_text(json.dumps({"path": str(folder / "pool")}))
    return {"pool": "directory", "pool_config": config}


def same_as_one_process(checkpoint: Path, ranks: dict[str, int], settings: dict[str, Any]) -> None:
    """Compare text with one process, and bits with those that no cache had a part in."""
    expected = in_one_process(checkpoint, **settings)
    llm = LLM(checkpoint, **(SMALL | settings | ranks))
    salted = llm.generate([LONG, OTHER], GREEDY, namespace=Namespace(salt="nobody's"))
    assert [one.cache.num_cached_tokens for one in salted] == [0, 0]
    for _ in range(2):
        found = llm.generate([LONG, OTHER], GREEDY)
        assert [tokens(one) for one in found] == expected
        assert [bits(one) for one in found] == [bits(one) for one in salted]
    assert found[0].cache.num_cached_tokens > 0
    llm.engine.check()
    llm.close()
