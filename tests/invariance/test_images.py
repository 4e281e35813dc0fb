"""Prompts with images, bit for bit: cached, from disk, preempted, batched, chunked, drafted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.native.library import load_kernels
from stemma.types import Tier
from tests.invariance.serving import MAX_TOKENS, NO_CACHE, Answer, answer_of, engine, small_device
from tests.vision_checkpoints import make_vision_checkpoint, picture, vision_params

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

Chat = list[dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(seed: int, width: int = 90, height: int = 60) -> dict[str, Any]:
    return {"type": "image", "image": picture(seed, width, height)}


def chats_of() -> list[tuple[Chat, SamplingParams]]:
    """Conversations about few images: with other questions, with others in the same place, without any."""
    found: list[Chat] = []
    for seed in (1, 2):
        for question in ("What is this? " * 3, "What was that?"):
            first = {"role": "user", "content": [image(seed), text(question)]}
            found.append([first])
            answer = {"role": "assistant", "content": "A tree. " * 5}
            both = [image(3, 60, 130), text("And this? "), image(seed)]
            found.append([first, answer, {"role": "user", "content": both}])
    found.append([{"role": "user", "content": "A question without images. " * 4}])
    greedy: dict[str, Any] = {"temperature": 0.0}
    return [
        (
            chat,
            SamplingParams(
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                logprobs=2,
                **(greedy if number % 3 else {"temperature": 1.0, "seed": number, "n": 2}),
            ),
        )
        for number, chat in enumerate(found)
    ]


def serve(llm: LLM, chats: list[tuple[Chat, SamplingParams]]) -> list[Answer]:
    return [answer_of(one) for one in llm.chat([chat for chat, _ in chats], [how for _, how in chats])]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", vision_params("qwen2.5-vl", "qwen3-vl"))
def test_any_way_of_serving(family: str, dtype: str, root: Path, tmp_path: Path) -> None:
    path = root / family
    if not path.exists():
        make_vision_checkpoint(family, path)
    chats = chats_of()
    with engine(path, dtype, **NO_CACHE) as llm:
        expected = [serve(llm, [one])[0] for one in chats]
        small = {**small_device(llm), "load_when": "always"}
    assert expected[2] != expected[6]  # the same question about another image
    disk = {"disk_cache": str(tmp_path / "disk"), "disk_cache_size": "64MB"}
    config = tmp_path / "pool.json"
    config.write_text(json.dumps({"path": str(tmp_path)}))
    pool = {"pool": "directory", "pool_config": str(config), "load_when": "always"}
    ways: dict[str, dict[str, Any]] = {
        "device": {"speculation": "off"},
        "small chunks, two threads": {"max_batch_tokens": 19, "num_threads": 2, "speculation": "off"},
        "preempted, every image encoded anew": {**small, "speculation": "off", "image_cache": "0B"},
        "host": {**small, "host_cache": "8MB", "num_threads": 2},
        "disk": {**small, **disk},
        "disk again": {**small, **disk},
        "few tokens a step": {
            "max_batch_tokens": 16 if family == "gemma3" else 2,  # an image's, which are computed in one step
            "max_num_seqs": 2,
            "num_threads": 2,
            "speculation": "off",
        },
        "pool": pool,
        "pool again": pool,
        "hash index": {"index": "hash", "speculation": "off"},
        "drafts": {"speculation_adaptive": False, "speculation": "auto"},
        "steps overlap": {"overlap_schedule": "on", "speculation": "off"},
    }
    rng = random.Random(1)
    for way, settings in ways.items():
        with engine(path, dtype, **settings) as llm:
            for round_number in range(2):
                order = list(range(len(chats)))
                rng.shuffle(order)
                size = rng.choice((3, len(order)))
                for first in range(0, len(order), size):
                    batch = order[first : first + size]
                    for number, answer in zip(batch, serve(llm, [chats[i] for i in batch]), strict=True):
                        assert answer == expected[number], (way, round_number, number)
            by_tier = llm.stats().cached_tokens_by_tier
            assert (way != "disk again") or by_tier[Tier.DISK] > 100
            assert (way != "pool again") or by_tier[Tier.POOL] > 100
