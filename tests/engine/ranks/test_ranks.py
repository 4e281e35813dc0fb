"""One engine on several processes: text as of one, bits that don't depend on the cache, ends and restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stemma import LLM
from stemma.errors import StemmaError
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
    same_as_one_process,
    tokens,
)
from tests.engine.ranks.processes import rank_processes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3-moe", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def start(checkpoint: Path, disk: Path) -> Iterator[Callable[[], LLM]]:
    """Return what starts the engine on two ranks, each with half of the experts."""
    started: list[LLM] = []

    def make() -> LLM:
        settings = SMALL | TIERS | {"kv_cache_memory": "96KB", "host_cache": "1MB", "disk_cache": disk}
        started.append(LLM(checkpoint, tensor_parallel_size=2, expert_parallel_size=2, **settings))
        return started[-1]

    yield make
    for llm in started:
        llm.close()


@pytest.fixture(scope="module")
def llm(start: Callable[[], LLM]) -> LLM:
    return start()


def test_the_text_is_that_of_one_process(llm: LLM, checkpoint: Path) -> None:
    assert [tokens(found) for found in llm.generate([LONG, OTHER], GREEDY)] == in_one_process(checkpoint)
    llm.engine.check()


def test_what_is_cached_doesnt_change_a_bit(llm: LLM) -> None:
    uncached = llm.generate(LONG, GREEDY, namespace=Namespace(salt="nobody's"))[0]
    assert uncached.cache.num_cached_tokens == 0
    cached, again = llm.generate(LONG, GREEDY)[0], llm.generate([OTHER, LONG], GREEDY)[1]
    assert cached.cache.num_cached_tokens > 0
    assert again.cache.num_cached_tokens > 0
    assert bits(uncached) == bits(cached) == bits(again)


def test_what_left_the_device_comes_back_on_all_ranks(llm: LLM) -> None:
    check_other_tiers(llm)


def test_answers_share_their_prompt(llm: LLM) -> None:
    check_shared_prompt(llm)


def test_a_rank_that_dies_ends_the_engine_and_a_restart_is_warm(llm: LLM, start: Callable[[], LLM]) -> None:
    check_death(llm, start)


@pytest.mark.slow
def test_one_rank_has_lost_its_disk(checkpoint: Path, tmp_path: Path) -> None:
    check_lost_disk(checkpoint, tmp_path, {"tensor_parallel_size": 2})


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("family", "expert_size"),
    [("llama", 1), ("gemma2", 1), ("qwen2", 1), ("mistral-sliding", 1), ("smollm3", 1), ("seed-oss", 1),
     ("qwen3-moe", 1), ("qwen3-moe", 2), ("deepseek-v3", 1), ("deepseek-v3", 2), ("deepseek-v2", 2)],
)  # fmt: skip
def test_families(family: str, expert_size: int, size: int, tmp_path: Path) -> None:
    checkpoint = build(family, tmp_path / "model", num_key_value_heads=4)
    ranks = {"tensor_parallel_size": size, "expert_parallel_size": expert_size}
    expected = in_one_process(checkpoint)
    settings = SMALL | TIERS | ranks | {"disk_cache": tmp_path / "disk"}
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
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int8"},
        {"speculation": "la"},
        {"index": "hash"},
        {"overlap_schedule": "on", "speculation": "off"},
        {"overlap_schedule": "on", "speculation": "off", "host_cache": "1MB", "kv_cache_memory": "96KB"},
        {"quantize": "int8", "quantize_group_size": 32},
        {"quantize": "int4"},
    ],
)
def test_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = build("llama", tmp_path, intermediate_size=128)
    same_as_one_process(checkpoint, {"tensor_parallel_size": 2}, settings)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_quantized_mixtures(family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"intermediate_size": 128, "moe_intermediate_size": 64}
    if family == "deepseek-v3":
        sizes["v_head_dim"] = 16
    checkpoint = build(family, tmp_path, **sizes)
    ranks = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
    same_as_one_process(checkpoint, ranks, {"quantize": "int4"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor_parallel_size", "context_parallel_size"])
def test_a_rank_that_hangs_ends_the_engine(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stemma.model.parallel.group.STEP_TIMEOUT_S", 2.0)
    monkeypatch.setattr("stemma.engine.ranks.leader.END_TIMEOUT_S", 2.0)
    llm = LLM(build("llama", tmp_path), **SMALL, **{kind: 2})
    [process] = rank_processes(os.getpid())
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(StemmaError, match=r"a step failed on rank 0: .*[Tt]imed out"):
        llm.generate(LONG, GREEDY)
    llm.close()
    assert rank_processes(os.getpid()) == []


@pytest.mark.slow
def test_what_one_rank_cannot_open_is_said_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "rank-1-of-2").write_text("no directory")
    with pytest.raises(StemmaError, match="rank-1-of-2"):
        LLM(checkpoint, tensor_parallel_size=2, disk_cache=tmp_path, **SMALL)
    assert rank_processes(os.getpid()) == []
