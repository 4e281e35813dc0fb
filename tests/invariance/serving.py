"""Ways of serving the same requests that must give the same answers, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stemma.config.settings import KVArrangement, KVDtype
from stemma.engine.llm import LLM
from stemma.engine.offline import Generation
from stemma.engine.sampling.params import SamplingParams
from tests.shared_loads import shared_loads

MTP = "deepseek-v3-mtp"
"""Served with its layer for multi-token prediction; what is expected is served without."""
BLOCK_SIZE = 16
MAX_TOKENS = 10
DEVICE_BYTES = 16_000_000
SMALL_TOKENS = 700
"""What two of the longer requests take: others are preempted and blocks move down."""
SMALL_STATES = 5
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
            sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": number, "n": 1 + number % 2}
            kind: dict[str, Any] = sampled if number % 3 == 0 else {"temperature": 0.0}
            asks.append(
                Ask(prompt, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2, **kind))
            )
    return asks


@contextmanager
def engine(path: Path, dtype: str, **settings: Any) -> Iterator[LLM]:
    """Run an engine in one process; of equal settings of the model, the model is loaded once."""
    defaults: dict[str, Any] = {
        "kv_cache_memory": f"{DEVICE_BYTES}B",
        "block_size": BLOCK_SIZE,
        "num_threads": 1,
    }
    with shared_loads():
        llm = LLM(path, dtype=dtype, device="cpu", **(defaults | settings))
    try:
        yield llm
    finally:
        llm.close()


def serve(llm: LLM, asks: Sequence[Ask]) -> list[Answer]:
    generations = llm.generate([list(ask.prompt) for ask in asks], [ask.params for ask in asks])
    return [answer_of(one) for one in generations]


def small_device(llm: LLM) -> dict[str, Any]:
    """Return settings of a device that holds `SMALL_TOKENS`, and a few states of recurrent layers."""
    layout = llm.engine.runner.kv.layout
    kv_bytes = SMALL_TOKENS * layout.bytes_per_token
    if layout.windows is not None:
        num_pages = SMALL_TOKENS // layout.block_size
        page_bytes = layout.blocks_per_page * layout.block_bytes
        return {"kv_cache_memory": f"{kv_bytes + num_pages * page_bytes}B", "max_batch_tokens": 128}
    if layout.state is None:
        return {"kv_cache_memory": f"{kv_bytes}B"}
    state_bytes = (SMALL_STATES * layout.blocks_per_state + 1) * layout.block_bytes
    total = kv_bytes + state_bytes
    return {"kv_cache_memory": f"{total}B"}


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
        small = {**small_device(llm), "load_when": "always"}
    ways: dict[str, dict[str, Any]] = {
        "device": {"speculation": "off"},
        "small chunks": {"max_batch_tokens": 19, "speculation": "off"},
        "preempted": {**small, "speculation": "off"},
        "host, two threads": {**small, "host_cache": "8MB", "num_threads": 2},
        "disk": {**small, "disk_cache": str(folder), "disk_cache_size": "64MB"},
        "disk again": {**small, "disk_cache": str(folder), "disk_cache_size": "64MB"},
        "drafts": {"speculation_adaptive": False, "speculation": "auto"},
        "lookahead": {"speculation_adaptive": False, "speculation": "la", "block_size": 8},
    }
    if path.name.endswith("-mtp"):
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
