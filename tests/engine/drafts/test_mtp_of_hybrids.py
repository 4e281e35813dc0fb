"""Drafts of Qwen3-Next's own MTP layer: states roll back, and answers and KV are the same without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import hybrids
from tests.shared_loads import shared_loads

from stemma import LLM, SamplingParams
from stemma.memory.device.kv import DeviceKV
from stemma.native.library import load_kernels
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.types import Tier

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrids.build_mtp(tmp_path_factory.mktemp("mtp") / "model")


@contextmanager
def engine(path: Path, **settings: Any) -> Iterator[LLM]:
    defaults = {"kv_cache_memory": "8MB", "block_size": 8, "num_threads": 1, "speculation": "mtp"}
    with shared_loads():
        llm = LLM(path, device="cpu", **(defaults | settings))
    try:
        yield llm
    finally:
        llm.close()


def words(seed: int, num_tokens: int) -> list[int]:
    result: list[int] = np.random.default_rng(seed).integers(3, 500, num_tokens).tolist()
    return result


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    return [
        [(one.token_ids, [part.logprob for part in one.logprobs or ()]) for one in found.completions]
        for found in llm.generate(list(prompts), list(params))
    ]


def varied_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts that share beginnings; greedy and sampled, several answers, penalties."""
    shared = words(0, 150)
    prompts = [shared + words(seed, 5 * seed + 1) for seed in range(5)] + [shared, shared[:8], words(9, 1)]
    kinds: list[dict[str, Any]] = [{}, {"n": 2, "temperature": 0.9, "seed": 3}, {"frequency_penalty": 0.7}]
    kinds.append({"prompt_logprobs": 2})
    params = [
        SamplingParams(
            **({"max_tokens": 14, "temperature": 0.0, "ignore_eos": True, "logprobs": 1} | kinds[i % 4])
        )
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture(scope="module")
def plain_answers(checkpoint: Path) -> list[Any]:
    """Answers without drafts and without a cache."""
    with engine(checkpoint, speculation="off", enable_prefix_cache=False) as llm:
        return answers(llm, *varied_requests())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("depth", "adaptive"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("memory", ["8MB", "700kB"])
def test_answers_are_the_same(
    checkpoint: Path, plain_answers: list[Any], depth: int, adaptive: bool, memory: str
) -> None:
    """Cold and warm; with little room and small chunks."""
    options = {"speculation_mtp_tokens": depth, "speculation_adaptive": adaptive}
    with engine(checkpoint, kv_cache_memory=memory, max_batch_tokens=23, **options) as llm:
        for _ in range(2):
            assert answers(llm, *varied_requests()) == plain_answers
            llm.engine.check()
        if not adaptive:
            assert llm.stats().drafts_by_source["mtp"].num_proposed > 40


def blocks_of(llm: LLM, tokens: list[int]) -> list[bytes]:
    """Return the bytes of the cached full blocks of a sequence, the MTP layer's included."""
    cache = llm.engine.cache
    assert cache.index is not None
    assert isinstance(cache.buffer, DeviceKV)
    found = cache.index.match(DEFAULT_NAMESPACE, np.array(tokens, dtype=np.int32))
    ids = found.block_ids[: found.num_full_blocks(cache.block_size)].tolist()
    return [bytes(cache.buffer.block_bytes_view(block).numpy()) for block in ids]


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_of_the_layer_depends_on_the_prefix_alone(checkpoint: Path, dtype: str) -> None:
    """Bit for bit, whatever was drafted, and behind a checkpoint: the hidden state before it is in it."""
    prompt = words(1, 140)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    plain = {"dtype": dtype, "speculation_adaptive": False, "speculation_mtp_tokens": 3}
    with engine(checkpoint, **plain) as llm:
        [[(answer, _)]] = answers(llm, [prompt], [params])
        whole = prompt + answer[:-1]
        drafted = blocks_of(llm, whole)
    one = SamplingParams(max_tokens=1, temperature=0.0)
    with engine(checkpoint, **plain) as llm:
        llm.generate([whole], one)
        expected = blocks_of(llm, whole)
    assert len(expected) == len(whole) // 8
    assert drafted == expected
    with engine(checkpoint, max_batch_tokens=11, **plain) as llm:
        llm.generate([prompt], one)
        assert llm.generate([whole], one)[0].cache.num_cached_tokens == 128
        assert blocks_of(llm, whole) == expected


def test_checkpoints_on_disk_have_the_hidden_state(checkpoint: Path, tmp_path: Path) -> None:
    disk = {"disk_cache": str(tmp_path / "disk"), "disk_cache_size": "64MB", "load_when": "always"}
    prompt = words(3, 150)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    found, blocks = [], []
    for tiers in ({}, {Tier.DISK: 128}):
        with engine(checkpoint, speculation_adaptive=False, **disk) as llm:
            one = llm.generate([prompt], params)[0]
            assert one.cache.cached_by_tier == tiers
            found.append([(part.token_id, part.logprob) for part in one.completions[0].logprobs])
            blocks.append(blocks_of(llm, prompt))
    assert found[0] == found[1]
    assert blocks[0] == blocks[1]
