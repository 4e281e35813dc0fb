"""Sequences whose KV lies on several processes: text as of one, the same bits from every tier, ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stemma import LLM
from stemma.errors import PromptTooLong
from stemma.prefix.keys import Namespace
from tests.checkpoints import build
from tests.engine.ranks.checks import (
    GREEDY,
    LONG,
    OTHER,
    SMALL,
    TIERS,
    bits,
    check_death,
    check_lost_disk,
    check_other_tiers,
    check_shared_prompt,
    in_one_process,
    tokens,
)

NARROW: dict[str, Any] = {"kv_cache_memory": "48KB"}
"""Of each rank: 96 tokens of the tiny models, so 192 on two ranks."""
VERY_LONG = LONG + OTHER


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def start(checkpoint: Path, disk: Path) -> Iterator[Callable[[], LLM]]:
    """Return what starts the engine on two ranks; prompts are computed in chunks of up to 40 tokens."""
    started: list[LLM] = []

    def make() -> LLM:
        settings = SMALL | TIERS | NARROW | {"host_cache": "1MB", "disk_cache": disk}
        started.append(LLM(checkpoint, context_parallel_size=2, max_batch_tokens=40, **settings))
        return started[-1]

    yield make
    for llm in started:
        llm.close()


@pytest.fixture(scope="module")
def llm(start: Callable[[], LLM]) -> LLM:
    return start()


@pytest.mark.slow
def test_the_text_is_that_of_one_process(llm: LLM, checkpoint: Path) -> None:
    assert [tokens(found) for found in llm.generate([LONG, OTHER], GREEDY)] == in_one_process(checkpoint)
    llm.engine.check()


@pytest.mark.slow
def test_a_prompt_may_exceed_the_memory_of_a_rank(llm: LLM, checkpoint: Path) -> None:
    one = LLM(checkpoint, **(SMALL | NARROW))
    with pytest.raises(PromptTooLong):
        one.generate(VERY_LONG, GREEDY)
    one.close()
    with_room = LLM(checkpoint, **SMALL)
    expected = tokens(with_room.generate(VERY_LONG, GREEDY)[0])
    with_room.close()
    assert tokens(llm.generate(VERY_LONG, GREEDY)[0]) == expected
    block_bytes = llm.engine.runner.kv.layout.block_bytes
    assert -(-len(VERY_LONG) // 8) * block_bytes <= 48_000 < len(VERY_LONG) * block_bytes // 4
    llm.engine.check()


def test_what_is_cached_doesnt_change_a_bit(llm: LLM) -> None:
    uncached = llm.generate(LONG, GREEDY, namespace=Namespace(salt="nobody's"))[0]
    assert uncached.cache.num_cached_tokens == 0
    cached, again = llm.generate(LONG, GREEDY)[0], llm.generate([OTHER, LONG], GREEDY)[1]
    assert again.cache.num_cached_tokens > 0
    assert bits(uncached) == bits(cached) == bits(again)
    for shared in (3, 21, 37, 60):  # parts in a block, on either rank; the head of that block is copied
        llm.generate(LONG, GREEDY)
        prompt = LONG[:shared] + OTHER[:20]
        other = llm.generate(prompt, GREEDY)[0]
        assert other.cache.num_cached_tokens >= shared
        fresh = llm.generate(prompt, GREEDY, namespace=Namespace(salt=f"fresh {shared}"))[0]
        assert fresh.cache.num_cached_tokens == 0
        assert bits(fresh) == bits(other)


def test_what_left_the_device_comes_back_on_all_ranks(llm: LLM) -> None:
    check_other_tiers(llm)


def test_answers_share_their_prompt(llm: LLM) -> None:
    check_shared_prompt(llm)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_engine_and_a_restart_is_warm(llm: LLM, start: Callable[[], LLM]) -> None:
    check_death(llm, start)


@pytest.mark.slow
def test_one_rank_has_lost_its_disk(checkpoint: Path, tmp_path: Path) -> None:
    check_lost_disk(checkpoint, tmp_path, {"context_parallel_size": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("llama", {"context_parallel_size": 2}),
        ("llama", {"context_parallel_size": 4}),
        ("llama", {"context_parallel_size": 2, "tensor_parallel_size": 2}),
        ("gemma2", {"context_parallel_size": 2}),
        ("mistral-sliding", {"context_parallel_size": 4}),
        ("qwen3-moe", {"context_parallel_size": 2}),
        ("qwen3-moe", {"context_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel_size": 2}),
        ("deepseek-v2", {"context_parallel_size": 2}),
        ("deepseek-v3", {"context_parallel_size": 2}),
        ("deepseek-v3", {"context_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel_size": 2}),
    ],
)
@pytest.mark.parametrize("chunk", [16, 512])
def test_families(family: str, ranks: dict[str, int], chunk: int, tmp_path: Path) -> None:
    checkpoint = build(family, tmp_path / "model")
    expected = in_one_process(checkpoint)
    settings = SMALL | TIERS | ranks | {"disk_cache": tmp_path / "disk", "max_batch_tokens": chunk}
    for hits in (0, 64):
        llm = LLM(checkpoint, **settings)
        found = llm.generate([LONG, OTHER], GREEDY)
        assert [tokens(one) for one in found] == expected
        assert found[0].cache.num_cached_tokens == hits
        uncached = llm.generate(LONG, GREEDY, namespace=Namespace(salt="nobody's"))[0]
        assert bits(uncached) == bits(found[0])
        llm.engine.check()
        llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "deepseek-v3"])
def test_bits_dont_depend_on_chunks(family: str, tmp_path: Path) -> None:
    checkpoint = build(family, tmp_path / "model", dtype=torch.bfloat16)
    found = []
    for chunk in (8, 24, 512):
        llm = LLM(checkpoint, context_parallel_size=2, max_batch_tokens=chunk, **SMALL)
        found.append([bits(one) for one in llm.generate([LONG, OTHER], GREEDY)])
        llm.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"kv_cache_dtype": "int8"}),
        ("llama", {"speculation": "la"}),
        ("llama", {"index": "hash"}),
        ("llama", {"overlap_schedule": "on"}),
        ("llama", {"quantize": "int8"}),
        ("deepseek-v3", {"kv_layout": "nz", "kv_cache_dtype": "int8"}),
        ("deepseek-v3", {"kv_layout": "nz"}),
    ],
)
def test_other_settings(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = build(family, tmp_path)
    expected = in_one_process(checkpoint, **settings)
    llm = LLM(checkpoint, context_parallel_size=2, **(SMALL | settings))
    for _ in range(2):
        assert [tokens(one) for one in llm.generate([LONG, OTHER], GREEDY)] == expected
    llm.engine.check()
    llm.close()


@pytest.mark.slow
def test_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEMMA_NATIVE", "0")
    checkpoint = build("deepseek-v3", tmp_path)
    llm = LLM(checkpoint, context_parallel_size=2, **SMALL)
    assert [tokens(one) for one in llm.generate([LONG, OTHER], GREEDY)] == in_one_process(checkpoint)
    llm.close()
