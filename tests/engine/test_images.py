"""Images in the engine: encoded once, counted, beside penalties, drafts, log-probabilities and beams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stemma.engine.llm import LLM
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import ConfigError, InvalidRequest, ModelError, UnsupportedModel
from stemma.native.library import load_kernels
from tests.checkpoints import build
from tests.vision_checkpoints import IMAGE_TOKENS, VISION_FAMILIES, make_vision_checkpoint, picture

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint("smolvlm", tmp_path_factory.mktemp("vision") / "smolvlm")


@pytest.fixture
def make(checkpoint: Path) -> Iterator[Make]:
    made: list[LLM] = []

    def one(path: Path = checkpoint, **settings: Any) -> LLM:
        made.append(LLM(path, **{"kv_cache_memory": "8MB", "block_size": 16, "device": "cpu"} | settings))
        return made[-1]

    yield one
    for llm in made:
        llm.close()


def chat(seed: int, question: str = "What is this?", **size: int) -> list[dict[str, Any]]:
    image = {"type": "image", "image": picture(seed, **size)}
    return [{"role": "user", "content": [image, {"type": "text", "text": question}]}]


def test_vectors_are_kept_within_their_budget(make: Make) -> None:
    llm = make(enable_prefix_cache=False, image_cache="45kB")  # an image: 80 vectors, 20 kB
    for seed in (1, 2, 1, 2):
        llm.chat(chat(seed), GREEDY)
    stats = llm.stats()
    assert (stats.num_encoded_images, stats.num_reused_images) == (2, 2)
    assert 0 < stats.image_cache_bytes <= 45_000
    for seed in (3, 4, 5, 1):
        llm.chat(chat(seed), GREEDY)
    assert llm.stats().num_encoded_images == 6
    assert llm.stats().image_cache_bytes <= 45_000


def test_an_image_in_several_chunks_is_encoded_once(make: Make) -> None:
    llm = make(max_batch_tokens=16, image_cache="0B")
    llm.chat(chat(1), GREEDY)
    assert llm.stats().num_encoded_images == 1


def test_another_image_never_hits(make: Make) -> None:
    llm = make()
    first = llm.chat(chat(1), GREEDY)[0]
    where = int(np.flatnonzero(first.prompt_token_ids == 512)[0])
    other = llm.chat(chat(2), GREEDY)[0]
    assert other.prompt_token_ids.tolist() == first.prompt_token_ids.tolist()
    assert other.cache.num_cached_tokens == where
    assert other.cache.miss_detail is not None
    assert other.cache.miss_detail.endswith(f"at position {where}: image 1 of message 1 differs.")
    larger = llm.chat(chat(1, height=30), GREEDY)[0]  # tiles of other numbers
    assert larger.cache.num_cached_tokens <= where
    assert "image 1 of message 1" in str(larger.cache.miss_detail)


def test_penalties_and_logprobs_count_placeholders(make: Make) -> None:
    llm = make()
    params = SamplingParams(
        max_tokens=8, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, prompt_logprobs=1
    )
    found = llm.chat(chat(1), params)[0]
    assert found.prompt_logprobs is not None
    assert found.prompt_logprobs.token_ids.max() < 600
    assert np.isfinite(found.prompt_logprobs.logprobs).all()


def test_drafts_of_images_are_never_proposed(make: Make) -> None:
    """The text before an image repeats: what followed it before was an image."""
    llm = make(speculation="auto", speculation_adaptive=False)
    words = "The tree in the park. The tree in the park. "
    [first] = chat(1, words)
    again = [first, {"role": "assistant", "content": words}, *chat(2, words)]
    for _ in range(3):
        found = llm.chat(again, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))[0]
        assert max(found.completions[0].token_ids) < 600


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_texts_with_images_and_beams(family: str, make: Make, tmp_path: Path) -> None:
    llm = make(make_vision_checkpoint(family, tmp_path / family))
    text = f"See {IMAGE_TOKENS[family]} and say what it is:"
    alone = llm.generate(text, GREEDY, images=[[picture(1)]])[0]
    both = llm.generate([text, text], GREEDY, images=[[picture(1)], [picture(2)]])
    assert both[0].completions[0].token_ids == alone.completions[0].token_ids
    with pytest.raises(InvalidRequest, match="stands for an image"):
        llm.generate(text, GREEDY, images=[[picture(1), picture(2)]])
    with pytest.raises(InvalidRequest, match="must be a data: URL"):
        llm.generate(text, GREEDY, images=[["https://example.com/a.png"]])


def test_models_of_text_refuse_images(make: Make, tmp_path: Path) -> None:
    llm = make(build("qwen2", tmp_path / "qwen2"))
    with pytest.raises(InvalidRequest, match="this model reads no images"):
        llm.generate("a <image>", GREEDY, images=[[picture(1)]])


def test_what_is_refused_by_name(make: Make, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory_limit doesn't go with SmolVLM"):
        make(memory_limit="4GB", kv_cache_memory=None)
    with pytest.raises(UnsupportedModel, match="served on CPU with kernels"):
        make(_without_a_layer(checkpoint, tmp_path))


def test_a_damaged_encoder_is_refused(make: Make, checkpoint: Path, tmp_path: Path) -> None:
    for what, message in (("drop", "is missing in the files"), ("nan", "NaN or infinite")):
        with pytest.raises(ModelError, match=message):
            make(_damaged(checkpoint, tmp_path / what, what))


def _damaged(checkpoint: Path, path: Path, what: str) -> Path:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, path)
    weights = load_file(path / "model.safetensors")
    name = "model.vision_model.post_layernorm.weight"
    if what == "drop":
        del weights[name]
    else:
        weights[name][0] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def _without_a_layer(checkpoint: Path, path: Path) -> Path:
    import shutil

    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(checkpoint, path / "copy"))
    weights = load_file(copy / "model.safetensors")
    del weights["model.text_model.norm.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy
