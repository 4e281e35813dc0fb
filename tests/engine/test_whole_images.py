"""Images whose tokens see each other both ways: one step computes each of them, and hits may end inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import ConfigError, UnsupportedModel
from stemma.native.library import load_kernels
from tests.vision_checkpoints import make_vision_checkpoint, picture

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")
Make = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint("gemma3", tmp_path_factory.mktemp("vision") / "gemma3")


@pytest.fixture
def make(checkpoint: Path) -> Iterator[Make]:
    made: list[LLM] = []

    def one(path: Path = checkpoint, **settings: Any) -> LLM:
        made.append(LLM(path, **{"kv_cache_memory": "8MB", "block_size": 16, "device": "cpu"} | settings))
        return made[-1]

    yield one
    for llm in made:
        llm.close()


def told(llm: LLM, text: str, seed: int = 1) -> tuple[list[int], list[float], int]:
    """Return the answer to a text about an image, its log-probabilities, and how much was cached."""
    [found] = llm.generate([text], GREEDY, images=[[picture(seed)]])
    one = found.completions[0]
    return list(one.token_ids), [token.logprob for token in one.logprobs], found.cache.num_cached_tokens


def test_a_hit_inside_an_image_goes_on_with_the_same_bits(make: Make, checkpoint: Path) -> None:
    """Windows are kept at multiples of 64 tokens, of which one lies in the image."""
    texts = [f"{'x ' * 28}<start_of_image>{question}" for question in ("What?", "Why is it so?", "Who?")]
    cold = make(enable_prefix_cache=False)
    expected = [told(cold, text)[:2] for text in texts]
    [prompt] = cold.generate([texts[0]], GREEDY, images=[[picture(1)]])
    placeholder = json.loads((checkpoint / "config.json").read_text())["image_token_index"]
    where = np.flatnonzero(prompt.prompt_token_ids == placeholder)
    assert where[4] < 64 <= where[-1]
    for settings in ({}, {"max_batch_tokens": 16}, {"free_windows": False}):
        warm = make(**settings)
        found = [told(warm, text) for text in texts]
        assert [one[:2] for one in found] == expected
        if "free_windows" not in settings:
            assert found[-1][2] == 64


def test_other_images_behind_the_same_text_are_told_apart(make: Make) -> None:
    warm, cold = make(), make(enable_prefix_cache=False)
    for seed in (1, 2, 1):
        assert told(warm, "<start_of_image>What?", seed)[:2] == told(cold, "<start_of_image>What?", seed)[:2]


def test_steps_that_hold_no_image_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="computes the 16 tokens of an image in one step"):
        make(max_batch_tokens=15)


def test_pan_and_scan_is_refused(make: Make, tmp_path: Path) -> None:
    path = make_vision_checkpoint("gemma3", tmp_path / "gemma3")
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_pan_and_scan": True}))
    with pytest.raises(UnsupportedModel, match="do_pan_and_scan"):
        make(path)


def test_prompts_that_wait_for_each_other_s_pages_end(make: Make) -> None:
    llm = make(kv_cache_memory="400kB", max_batch_tokens=24, speculation="off")
    texts = [f"{seed} {'y' * 40}<start_of_image>{'z' * 30}" for seed in range(8)]
    found = llm.generate(texts, GREEDY, images=[[picture(seed)] for seed in range(8)])
    cold = make(enable_prefix_cache=False)
    expected = cold.generate(texts, GREEDY, images=[[picture(seed)] for seed in range(8)])
    assert [one.completions[0].token_ids for one in found] == [
        one.completions[0].token_ids for one in expected
    ]
