"""Steps in one native call: products, threads, whole models against plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests import checkpoints
from tests.model.conftest import LoadFamily
from tests.model.paging import PagedSequences, plain_logits

from stemma.config.settings import ModelSettings
from stemma.model.cpu import decoder_step, fused
from stemma.model.cpu.decoder_step import PackedEmbedding
from stemma.model.cpu.fused import FusedDecoder
from stemma.model.cpu.weights import PackedProduct, can_pack
from stemma.model.loading import load_model
from stemma.native.library import load_kernels

BF16_TOLERANCE = 2e-2
PASS_ROWS = 256
"""As in decoder_step.h: tokens that go through a product at a time."""
KERNELS = load_kernels()
THREADS = (1, 2, 5)
"""Five threads on two cores: they must let each other run, and strips are cut into parts for them."""

pytestmark = pytest.mark.skipif(
    KERNELS is None or not KERNELS.has_bf16_dot or not can_pack(torch.bfloat16, torch.device("cpu")),
    reason="needs AVX512_BF16, a compiler and oneDNN",
)


@pytest.fixture
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def random_prompts(*lens: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 200, (n,), generator=generator).tolist() for n in lens]


@pytest.mark.parametrize("_threads", THREADS, indirect=True)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-sliding"])
@pytest.mark.usefixtures("_threads")
def test_steps_equal_transformers(family: str, load_family: LoadFamily) -> None:
    """Chunks of all sizes up to the limit and beside each other; bias, head norms and windows included."""
    path, model = load_family(family, "bfloat16")
    assert isinstance(model.decoder, FusedDecoder)
    assert model.decoder._step is not None
    prompts = random_prompts(150 + PASS_ROWS, 90, 41)
    run = PagedSequences(model, prompts)
    for first in (1, 2, 5, 6, 7, 13, 24, 40):
        run.step([(0, first), (1, 1), (2, 3)])
    run.step([(0, PASS_ROWS + 20)])
    run.finish(chunk=20)
    for prompt, logits in zip(prompts, run.logits, strict=True):
        expected = plain_logits(path, prompt, torch.bfloat16)
        assert (logits - expected).norm() / expected.norm() < BF16_TOLERANCE


def test_beyond_a_limit_steps_go_call_by_call(
    load_family: LoadFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with many tokens on a processor with AMX."""
    path, model = load_family("qwen2", "bfloat16")
    assert isinstance(model.decoder, FusedDecoder)
    assert model.decoder._step is not None
    monkeypatch.setattr(model.decoder._step, "max_rows", 20)
    sizes: list[int] = []
    forward = decoder_step.DecoderStep.forward

    def spy(self: decoder_step.DecoderStep, batch, kv, hidden, *rest):  # type: ignore[no-untyped-def]
        sizes.append(len(hidden))
        return forward(self, batch, kv, hidden, *rest)

    monkeypatch.setattr(decoder_step.DecoderStep, "forward", spy)
    (prompt,) = random_prompts(60)
    run = PagedSequences(model, [prompt])
    for size in (21, 20, 1, 18):
        run.step([(0, size)])
    assert sizes == [20, 1, 18]
    expected = plain_logits(path, prompt, torch.bfloat16)
    assert (run.logits[0] - expected).norm() / expected.norm() < BF16_TOLERANCE


@pytest.mark.parametrize("_threads", THREADS, indirect=True)
@pytest.mark.usefixtures("_threads")
def test_a_row_doesnt_depend_on_its_neighbours(load_family: LoadFamily) -> None:
    """The products of a token are the same to the bit in any batch."""
    _, model = load_family("qwen3", "bfloat16")
    (prompt,) = random_prompts(1)
    alone = PagedSequences(model, [prompt])
    alone.step([(0, 1)])
    for others in (1, 5, 6, 12, 30, 70, 300):
        many = PagedSequences(model, [prompt, *random_prompts(*[1] * others, seed=1)])
        many.step([(seq, 1) for seq in range(others + 1)])
        assert torch.equal(many.logits[0], alone.logits[0])


def test_a_tied_head_is_packed_once(tmp_path: Path) -> None:
    """As in Qwen2.5-0.5B: the embedding is read out of the packed head."""
    path = checkpoints.build("qwen2", tmp_path, tie_word_embeddings=True)
    model = load_model(ModelSettings(path=path, device="cpu", dtype="bfloat16"))
    assert isinstance(model.decoder, FusedDecoder)
    assert isinstance(model.decoder._embed, PackedEmbedding)
    prompts = random_prompts(150, 20)
    run = PagedSequences(model, prompts)
    run.step([(0, 100), (1, 7)])
    run.finish(chunk=9)
    for prompt, logits in zip(prompts, run.logits, strict=True):
        expected = plain_logits(path, prompt, torch.bfloat16)
        assert (logits - expected).norm() / expected.norm() < BF16_TOLERANCE


@pytest.mark.parametrize("shape", [(64, 64), (130, 70), (1, 2), (7, 4864)])
def test_rows_come_out_as_they_went_in(shape: tuple[int, int]) -> None:
    assert KERNELS is not None
    weight = torch.randn(*shape).bfloat16()
    product = PackedProduct(weight, None)
    assert product.strips is not None
    ids = torch.randint(shape[0], (300,))
    assert torch.equal(PackedEmbedding(KERNELS, product)(ids), F.embedding(ids, weight))


def test_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If oneDNN packs otherwise (another version, another processor), steps go call by call."""
    weight = torch.randn(128, 64).bfloat16()
    assert PackedProduct(weight, None).strips is not None
    mixed = weight[torch.randperm(128, generator=torch.Generator().manual_seed(0))]
    monkeypatch.setattr(
        "stemma.model.cpu.weights._pack", lambda _: torch.ops.mkldnn._reorder_linear_weight(mixed)
    )
    assert PackedProduct(weight, None).strips is None
    assert PackedProduct(torch.randn(5, 7).bfloat16(), None).strips is None  # pairs need an even width


def test_without_strips_models_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stemma.model.cpu.weights._address_of_strips", lambda weight, packed: None)
    path = checkpoints.build("qwen2", tmp_path, tie_word_embeddings=True)
    model = load_model(ModelSettings(path=path, device="cpu", dtype="bfloat16"))
    assert isinstance(model.decoder, fused.FusedDecoder)
    assert model.decoder._step is None
    prompts = random_prompts(30)
    run = PagedSequences(model, prompts)
    run.finish(chunk=11)
    expected = plain_logits(path, prompts[0], torch.bfloat16)
    assert (run.logits[0] - expected).norm() / expected.norm() < BF16_TOLERANCE
