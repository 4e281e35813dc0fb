"""Steps in one native call: threads, batches, whole models against plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests import checkpoints
from tests.model.conftest import LoadFamily
from tests.model.paging import PagedSequences, plain_logits
from tests.native.isa import level_params

from stemma.config.settings import ModelSettings
from stemma.model.cpu.fused import FusedDecoder
from stemma.model.load.loading import load_model

BF16_TOLERANCE = 2e-2
PASS_ROWS = 256
"""As in products.h: tokens that go through a product at a time."""
THREADS = (1, 2, 5)
"""Five threads on two cores: they must let each other run, and strips are cut into parts for them."""


@pytest.fixture
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def random_prompts(*lens: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 200, (n,), generator=generator).tolist() for n in lens]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("_threads", THREADS, indirect=True)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-sliding", "smollm3"])
@pytest.mark.usefixtures("_threads")
def test_steps_equal_transformers(family: str, load_family: LoadFamily) -> None:
    """Chunks of all sizes and beside each other; bias, head norms and windows included."""
    path, model = load_family(family, "bfloat16")
    prompts = random_prompts(150 + PASS_ROWS, 90, 41)
    run = PagedSequences(model, prompts)
    for first in (1, 2, 5, 6, 7, 13, 24, 40):
        run.step([(0, first), (1, 1), (2, 3)])
    run.step([(0, PASS_ROWS + 20)])
    run.finish(chunk=20)
    for prompt, logits in zip(prompts, run.logits, strict=True):
        expected = plain_logits(path, prompt, torch.bfloat16)
        assert (logits - expected).norm() / expected.norm() < BF16_TOLERANCE


@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_logits_are_the_same_to_the_bit_in_any_step(
    family: str, dtype: str, isa: str, load_family: LoadFamily
) -> None:
    """Token by token, in chunks, beside others, on several threads."""
    _, model = load_family(family, dtype, isa=isa)
    assert isinstance(model.decoder, FusedDecoder)
    prompts = random_prompts(90, 70, 33)
    alone = PagedSequences(model, prompts[:1])
    alone.finish(chunk=1)
    for threads, chunk in ((1, 90), (2, 7), (3, 40)):
        torch.set_num_threads(threads)
        try:
            together = PagedSequences(model, prompts, seed=chunk)
            together.finish(chunk=chunk)
        finally:
            torch.set_num_threads(1)
        assert torch.equal(together.logits[0], alone.logits[0])


@pytest.mark.parametrize("_threads", THREADS, indirect=True)
@pytest.mark.usefixtures("_threads")
def test_a_row_doesnt_depend_on_its_neighbours(load_family: LoadFamily) -> None:
    """A token's logits are the same to the bit beside any number of others."""
    _, model = load_family("qwen3", "bfloat16")
    (prompt,) = random_prompts(1)
    alone = PagedSequences(model, [prompt])
    alone.step([(0, 1)])
    for others in (1, 5, 6, 12, 30, 70, 300):
        many = PagedSequences(model, [prompt, *random_prompts(*[1] * others, seed=1)])
        many.step([(seq, 1) for seq in range(others + 1)])
        assert torch.equal(many.logits[0], alone.logits[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [96, 100])
def test_a_tied_head_serves_as_embedding(dtype: str, width: int, tmp_path: Path) -> None:
    """As in Qwen2.5-0.5B: rows of the embedding are read out of the packed head. Any width of the MLP."""
    path = checkpoints.build("qwen2", tmp_path, tie_word_embeddings=True, intermediate_size=width)
    model = load_model(ModelSettings.model_validate({"path": path, "device": "cpu", "dtype": dtype}))
    prompts = random_prompts(150, 20)
    run = PagedSequences(model, prompts)
    run.step([(0, 100), (1, 7)])
    run.finish(chunk=9)
    for prompt, logits in zip(prompts, run.logits, strict=True):
        expected = plain_logits(path, prompt, getattr(torch, dtype))
        assert (logits - expected).norm() / expected.norm() < BF16_TOLERANCE
