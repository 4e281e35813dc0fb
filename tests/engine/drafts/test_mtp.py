"""Drafts of the model's own MTP layer: the same answers, and KV that depends on the prefix alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import mtp_training
from tests.checkpoints import build, build_mtp
from tests.shared_loads import shared_loads

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import ConfigError
from stemma.memory.device.kv import DeviceKV
from stemma.native.library import load_kernels
from stemma.prefix.keys import DEFAULT_NAMESPACE

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mtp(tmp_path_factory.mktemp("mtp") / "model")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_training.train(tmp_path_factory.mktemp("trained") / "model", num_steps=90)


@contextmanager
def engine(path: Path, **settings: Any) -> Iterator[LLM]:
    defaults = {"kv_cache_memory": "8MB", "block_size": 8, "num_threads": 1, "speculation": "mtp"}
    with shared_loads():
        llm = LLM(path, device="cpu", **(defaults | settings))
    try:
        yield llm
    finally:
        llm.close()


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **options)


def words(seed: int, num_tokens: int) -> list[int]:
    result: list[int] = np.random.default_rng(seed).integers(3, 500, num_tokens).tolist()
    return result


def tokens_of(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[list[list[int]]]:
    return [
        [one.token_ids for one in answer.completions] for answer in llm.generate(list(prompts), list(params))
    ]


def blocks_of(llm: LLM, tokens: list[int]) -> list[bytes]:
    """Return the bytes of the cached full blocks of a sequence, the MTP layer's included."""
    cache = llm.engine.cache
    assert cache.index is not None
    assert isinstance(cache.buffer, DeviceKV)
    found = cache.index.match(DEFAULT_NAMESPACE, np.array(tokens, dtype=np.int32))
    ids = found.block_ids[: found.num_full_blocks(cache.block_size)].tolist()
    return [bytes(cache.buffer.block_bytes_view(block).numpy()) for block in ids]


def varied_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts that share beginnings; greedy and sampled, several answers, penalties."""
    shared = words(0, 37)
    prompts = [shared + words(seed, 5 * seed + 1) for seed in range(5)] + [shared, shared[:8], words(9, 1)]
    kinds: list[dict[str, Any]] = [{}, {"n": 2, "temperature": 0.9, "seed": 3}, {"frequency_penalty": 0.7}]
    kinds.append({"prompt_logprobs": 2})
    params = [
        SamplingParams(**({"max_tokens": 14, "temperature": 0.0, "ignore_eos": True} | kinds[i % 4]))
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture(scope="module")
def plain_answers(checkpoint: Path) -> list[list[list[int]]]:
    """Answers without drafts and without a cache."""
    with engine(checkpoint, speculation="off", enable_prefix_cache=False) as llm:
        return tokens_of(llm, *varied_requests())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("depth", "adaptive"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("memory", ["8MB", "130kB"])
def test_answers_are_the_same(
    checkpoint: Path, plain_answers: list[list[list[int]]], depth: int, adaptive: bool, memory: str
) -> None:
    """Cold and warm; with preemptions and small chunks."""
    options = {"speculation_mtp_tokens": depth, "speculation_adaptive": adaptive}
    with engine(checkpoint, kv_cache_memory=memory, max_batch_tokens=23, **options) as llm:
        for _ in range(2):
            assert tokens_of(llm, *varied_requests()) == plain_answers
            llm.engine.check()
        counts = llm.stats().drafts_by_source
        if not adaptive:
            assert counts["mtp"].num_proposed > 50
        if memory == "130kB":
            assert llm.stats().num_preemptions > 0


@pytest.mark.one_in(3)
@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")]
)
def test_kv_depends_on_the_prefix_alone(checkpoint: Path, dtype: str, kv_dtype: str) -> None:
    """Bit for bit, whatever was cached before, in whatever chunks, and whether tokens were drafted."""
    prompt, params = words(1, 43), greedy(30)
    plain = {"dtype": dtype, "kv_cache_dtype": kv_dtype, "speculation_adaptive": False}
    with engine(checkpoint, **plain) as llm:
        answer = tokens_of(llm, [prompt], [params])[0][0]
        whole = prompt + answer[:-1]
        drafted = blocks_of(llm, whole)
    with engine(checkpoint, **plain) as llm:
        llm.generate([whole], greedy(1))
        expected = blocks_of(llm, whole)
    assert len(expected) == len(whole) // 8
    assert drafted == expected
    for num_known in (1, 8, 13, 42):
        with engine(checkpoint, max_batch_tokens=11, speculation_mtp_tokens=3, **plain) as llm:
            llm.generate([prompt[:num_known] + words(5, 12)], greedy(3))
            cached = llm.generate([prompt], params)[0].cache
            assert cached.num_cached_tokens == num_known
            assert blocks_of(llm, whole) == expected


def test_a_hit_is_reported_whole(checkpoint: Path) -> None:
    """The last cached token is computed again for its hidden state; its KV is not."""
    prompt = words(2, 40)
    with engine(checkpoint) as llm:
        llm.generate([prompt], greedy(1))
        assert llm.generate([prompt], greedy(1))[0].cache.num_cached_tokens == 39


def test_warm_from_disk(checkpoint: Path, tmp_path: Path) -> None:
    """A restarted engine reads the layer's KV with the model's; without the layer the blocks don't match."""
    disk = {"disk_cache": str(tmp_path / "disk"), "disk_cache_size": "64MB", "load_when": "always"}
    prompt, params = words(3, 60), greedy(12)
    with engine(checkpoint, **disk) as llm:
        first = tokens_of(llm, [prompt], [params])
        blocks = blocks_of(llm, prompt)
    with engine(checkpoint, **disk) as llm:
        answer = llm.generate([prompt], params)[0]
        assert answer.cache.num_cached_tokens >= 56
        assert [one.token_ids for one in answer.completions] == first[0]
        assert blocks_of(llm, prompt)[:7] == blocks[:7]
    with engine(checkpoint, speculation="auto", **disk) as llm:
        answer = llm.generate([prompt], params)[0]
        assert answer.cache.num_cached_tokens == 0
        assert [one.token_ids for one in answer.completions] == first[0]


def test_a_random_layer_guesses_by_chance(checkpoint: Path) -> None:
    with engine(checkpoint, speculation_adaptive=False) as llm:
        llm.generate([words(seed, 30) for seed in range(4)], greedy(40))
        count = llm.stats().drafts_by_source["mtp"]
        assert count.num_proposed > 100
        assert count.num_accepted < 0.1 * count.num_proposed


def check_trained(path: Path, least: float) -> None:
    """Guesses of a trained layer hold, cold and after hits, and each saves a step."""
    prompts = [mtp_training.text(40, seed) for seed in range(4)]
    with engine(path, speculation="off") as llm:
        expected = tokens_of(llm, prompts, [greedy(40)] * 4)
    for depth in (1, 2):
        with engine(path, speculation_adaptive=False, speculation_mtp_tokens=depth) as llm:
            for _ in range(2):
                before = llm.stats().drafts_by_source
                assert tokens_of(llm, prompts, [greedy(40)] * 4) == expected
                count = llm.stats().drafts_by_source["mtp"]
                known = before.get("mtp")
                proposed = count.num_proposed - (known.num_proposed if known else 0)
                accepted = count.num_accepted - (known.num_accepted if known else 0)
                assert accepted > least * proposed, (depth, accepted, proposed)


@pytest.mark.slow
def test_a_trained_layer_guesses_right(trained: Path) -> None:
    check_trained(trained, 0.5)


@pytest.mark.slow
def test_a_layer_trained_longer_guesses_better(tmp_path: Path) -> None:
    check_trained(mtp_training.train(tmp_path / "model", num_steps=600), 0.8)


def test_beams_are_the_same(checkpoint: Path) -> None:
    """A beam search drafts nothing; its hypotheses fork and hit like any sequences."""
    prompts, found = [words(6, 20), words(7, 33)], []
    for mode in ("off", "mtp"):
        with engine(checkpoint, speculation=mode) as llm:
            generations = llm.beam_search(prompts, 3, 6)
            found.append([[one.token_ids for one in answer.completions] for answer in generations])
            llm.engine.check()
    assert found[0] == found[1]


def test_other_models_are_refused_at_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = build("qwen2", tmp_path_factory.mktemp("qwen2"))
    with pytest.raises(ConfigError, match="speculation is mtp, but"):
        LLM(path, speculation="mtp")
