"""Answers and log-probabilities, bit for bit: from any tier, in any batch, preempted, drafted, forked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stemma.config.settings import KVArrangement, KVDtype
from stemma.engine.llm import LLM, Generation
from stemma.engine.sampling.params import SamplingParams
from stemma.native.levels import available_levels
from stemma.native.library import load_kernels
from tests.checkpoints import build, build_mtp

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

FAMILIES = ("qwen2", "qwen3-moe", "deepseek-v3", "mistral-sliding", "gpt-oss")
MTP = "deepseek-v3-mtp"
"""Served with its layer for multi-token prediction; what is expected is served without."""
DTYPES = ("bfloat16", "float32")
BLOCK_SIZE = 16
MAX_TOKENS = 10
DEVICE_BYTES = 16_000_000
SMALL_TOKENS = 700
"""What two of the longer requests take: others are preempted and blocks move down."""
NO_CACHE = {"enable_prefix_cache": False, "max_num_seqs": 1, "speculation": "off"}


@dataclass(frozen=True)
class Ask:
    """A prompt and how it is to be answered."""

    prompt: tuple[int, ...]
    params: SamplingParams


Answer = list[tuple[list[int], list[Any]]]
"""Token ids and log-probabilities of each completion."""


def answer_of(generation: Generation) -> Answer:
    return [(one.token_ids, one.logprobs) for one in generation.completions]


def asks_of(num_conversations: int) -> list[Ask]:
    """Conversations of two turns over two long prefixes, greedy and sampled, some with two answers."""
    rng = random.Random(0)

    def words(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 500) for _ in range(num_tokens))

    prefixes = [words(270), words(37)]
    asks = []
    for number in range(num_conversations):
        first = prefixes[number % 2] + words(rng.randrange(1, 60))
        for prompt in (first, first + words(25)):
            sampled = {"temperature": 1.0, "top_p": 0.9, "seed": number, "n": 1 + number % 2}
            kind = sampled if number % 3 == 0 else {"temperature": 0.0}
            asks.append(
                Ask(prompt, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2, **kind))
            )
    return asks


@contextmanager
def engine(path: Path, dtype: str, **settings: Any) -> Iterator[LLM]:
    defaults: dict[str, Any] = {
        "kv_cache_memory": f"{DEVICE_BYTES}B",
        "block_size": BLOCK_SIZE,
        "num_threads": 1,
    }
    llm = LLM(path, dtype=dtype, device="cpu", **(defaults | settings))
    try:
        yield llm
    finally:
        llm.close()


def serve(llm: LLM, asks: Sequence[Ask]) -> list[Answer]:
    generations = llm.generate([list(ask.prompt) for ask in asks], [ask.params for ask in asks])
    return [answer_of(one) for one in generations]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("invariance")

    def make(family: str) -> Path:
        path = root / family
        if path.exists():
            return path
        return build_mtp(path) if family == MTP else build(family, path)

    return make


def check_family(
    path: Path,
    dtype: str,
    folder: Path,
    num_conversations: int,
    kv_dtype: KVDtype = "auto",
    kv_layout: KVArrangement = "rows",
) -> None:
    """Serve the same requests in many ways; what one at a time gets without a cache is what all get.

    What is expected is served with whole rows of KV, whatever `kv_layout` is.
    """
    asks = asks_of(num_conversations)
    stored = {"kv_cache_dtype": kv_dtype}
    with engine(path, dtype, **NO_CACHE, **stored) as llm:
        expected = [serve(llm, [ask])[0] for ask in asks]
        small = {
            "kv_cache_memory": f"{SMALL_TOKENS * DEVICE_BYTES // llm.engine.cache.capacity_tokens}B",
            "load_when": "always",
        }
    ways: dict[str, dict[str, Any]] = {
        "device": {"speculation": "off"},
        "small chunks, two threads": {"max_batch_tokens": 19, "num_threads": 2, "speculation": "off"},
        "preempted": {**small, "speculation": "off"},
        "host": {**small, "host_cache": "8MB", "num_threads": 2},
        "disk": {**small, "disk_cache": str(folder), "disk_cache_size": "64MB"},
        "disk again": {**small, "disk_cache": str(folder), "disk_cache_size": "64MB"},
        "drafts": {"speculation_adaptive": False, "speculation": "auto"},
        "lookahead": {"speculation_adaptive": False, "speculation": "la", "block_size": 8},
    }
    if path.name == MTP:
        mtp = {"speculation": "mtp", "speculation_adaptive": False}
        ways = {
            way: {**settings, **mtp, "speculation_mtp_tokens": 1 + number % 3}
            for number, (way, settings) in enumerate(ways.items())
            if settings.get("speculation") not in ("auto", "la")
        }
    rng = random.Random(1)
    for way, settings in ways.items():
        with engine(path, dtype, **settings, **stored, kv_layout=kv_layout) as llm:
            for round_number in range(2):
                order = list(range(len(asks)))
                rng.shuffle(order)
                size = rng.choice((3, len(order)))
                for first in range(0, len(order), size):
                    batch = order[first : first + size]
                    for number, answer in zip(batch, serve(llm, [asks[i] for i in batch]), strict=True):
                        assert answer == expected[number], (way, round_number, number)


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen2", "bfloat16"), ("deepseek-v3", "float32"), (MTP, "bfloat16")]
)
def test_answers(family: str, dtype: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    check_family(checkpoint(family), dtype, tmp_path / "disk", 2 if family == MTP else 3)


def test_answers_over_codes(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    check_family(checkpoint("qwen2"), "bfloat16", tmp_path / "disk", 3, "int8")


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v2", MTP])
def test_answers_over_tiled_latents(
    family: str, dtype: str, kv_dtype: KVDtype, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    check_family(checkpoint(family), dtype, tmp_path / "disk", 3, kv_dtype, "nz")


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [*FAMILIES, MTP])
def test_more_answers(
    family: str, dtype: str, kv_dtype: KVDtype, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    check_family(checkpoint(family), dtype, tmp_path / "disk", 12, kv_dtype)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_beams(kv_dtype: KVDtype, checkpoint: Callable[[str], Path]) -> None:
    """A beam search finds the same answers with everything cached, and beside another one."""
    path = checkpoint("qwen2")
    prompts = [list(ask.prompt) for ask in asks_of(3)]
    with engine(path, "bfloat16", **NO_CACHE, kv_cache_dtype=kv_dtype) as llm:
        expected = [answer_of(llm.beam_search([prompt], 3, 6)[0]) for prompt in prompts]
    with engine(path, "bfloat16", kv_cache_dtype=kv_dtype) as llm:
        for _ in range(2):
            assert [answer_of(one) for one in llm.beam_search(prompts, 3, 6)] == expected


def test_levels_share_stored_blocks_only_if_allowed(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """What another level computed has other bits: by default it is no hit."""
    path = checkpoint("qwen2")
    prompt = list(asks_of(1)[0].prompt)
    params = SamplingParams(max_tokens=2, temperature=0.0)
    for shares in (False, True):
        cached = []
        for isa in ("portable", available_levels()[-1].name):
            settings = {
                "disk_cache": str(tmp_path / str(shares)),
                "disk_cache_size": "64MB",
                "load_when": "always",
            }
            with engine(path, "bfloat16", isa=isa, share_across_levels=shares, **settings) as llm:
                cached.append(llm.generate(prompt, params)[0].cache.num_cached_tokens)
        assert cached[0] == 0
        assert (cached[1] > 0) == shares
