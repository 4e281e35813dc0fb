"""Logits over paged KV equal plain transformers, whatever the batch looks like."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stemma.config.settings import KVDtype
from tests.checkpoints import FAMILIES, MOE_FAMILIES
from tests.model.conftest import MODULES, NATIVE, PATHS, LoadFamily
from tests.model.paging import PagedSequences, coded_logits, plain_logits

FP32_TOLERANCE = 1e-4
BF16_TOLERANCE = 2e-2
DENSE_FAMILIES = tuple(family for family in FAMILIES if family not in MOE_FAMILIES)


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(length)] for length in lengths]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_equal_plain_transformers(family: str, how: str, load_family: LoadFamily) -> None:
    """Prefill chunks of three sizes and decodes of uneven context share each step."""
    path, model = load_family(family, "float32", how)
    prompts = random_prompts(70, 41, 9, 66)
    run = PagedSequences(model, prompts)
    run.step([(0, 50), (1, 7)])
    run.step([(1, 13), (0, 1), (2, 8)])
    while run.done != [70, 41, 9, 66]:
        sizes = (1, 1, 1, 16)
        run.step(
            [(s, min(sizes[s], len(p) - run.done[s])) for s, p in enumerate(prompts) if run.done[s] < len(p)]
        )
    for prompt, logits in zip(prompts, run.logits, strict=True):
        torch.testing.assert_close(logits, plain_logits(path, prompt), atol=FP32_TOLERANCE, rtol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stored", ["int8", "fp8"])
@pytest.mark.parametrize("how", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_kv_as_codes_equals_transformers_over_such_kv(
    family: str, how: str, stored: KVDtype, load_family: LoadFamily
) -> None:
    """Chunks, decodes and a prefix that ends inside a block: every query reads codes, its own token's too.

    A number that lies between two codes may be rounded to either: that is seen in few tokens, and small.
    """
    path, model = load_family(family, "float32", how)
    first, second = random_prompts(70, 41)
    second[:21] = first[:21]
    run = PagedSequences(model, [first, second], kv_dtype=stored)
    run.step([(0, 50)])
    run.reuse(0, 1, 21)
    run.step([(0, 1), (1, 7)])
    run.step([(1, 1), (0, 18)])
    run.finish(chunk=5)
    assert stored != "auto"
    for prompt, logits in zip(run.prompts, run.logits, strict=True):
        errors = (logits - coded_logits(path, prompt, stored)).abs().amax(dim=-1)
        assert errors.median() < FP32_TOLERANCE / 4
        assert errors.max() < 20 * FP32_TOLERANCE
        apart = (logits - plain_logits(path, prompt)).abs().amax(dim=-1)
        assert apart.median() > 20 * FP32_TOLERANCE


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_split_and_any_cached_part(
    family: str, how: str, load_family: LoadFamily, data: st.DataObject
) -> None:
    """A prompt cut anywhere, its head taken from another sequence's blocks, mid-block or not."""
    path, model = load_family(family, "float32", how)
    block_size = data.draw(st.sampled_from([1, 4, 16]), label="block_size")
    shared = data.draw(st.integers(1, 60), label="shared")
    first, rest_a, rest_b = random_prompts(shared, 3, 45, seed=shared)
    prompts = [first + rest_a, first + rest_b]
    run = PagedSequences(model, prompts, block_size=block_size, seed=shared)
    run.step([(0, len(prompts[0]))])
    run.reuse(0, 1, data.draw(st.integers(0, shared), label="cached"))
    while run.done[1] < len(prompts[1]):
        left = len(prompts[1]) - run.done[1]
        run.step([(1, data.draw(st.integers(1, left), label="chunk"))])
    torch.testing.assert_close(run.logits[1], plain_logits(path, prompts[1]), atol=FP32_TOLERANCE, rtol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", PATHS)
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_bfloat16_is_as_close_as_bfloat16_gets(family: str, how: str, load_family: LoadFamily) -> None:
    """Within the rounding of bf16; logits are compared relative to their size."""
    path, model = load_family(family, "bfloat16", how)
    prompts = random_prompts(60, 33)
    run = PagedSequences(model, prompts)
    run.step([(0, 40)])
    run.finish(chunk=1)
    for prompt, logits in zip(prompts, run.logits, strict=True):
        expected = plain_logits(path, prompt, torch.bfloat16)
        error = (logits - expected).norm() / expected.norm()
        assert error < BF16_TOLERANCE


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", PATHS)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_bfloat16_experts(family: str, how: str, load_family: LoadFamily) -> None:
    """As near to float32 as plain transformers in bfloat16, for most tokens.

    A router whose choice hangs on rounding may send a few tokens elsewhere, in transformers too.
    """
    path, model = load_family(family, "bfloat16", how)
    (prompt,) = random_prompts(60)
    run = PagedSequences(model, [prompt])
    run.finish(chunk=20)
    exact = plain_logits(path, prompt, torch.float32)
    plain = plain_logits(path, prompt, torch.bfloat16)
    ours, theirs = (
        ((logits - exact).norm(dim=-1) / exact.norm(dim=-1)).median() for logits in (run.logits[0], plain)
    )
    assert ours < max(BF16_TOLERANCE, 1.5 * theirs)


@pytest.mark.parametrize("how", PATHS)
@pytest.mark.parametrize("family", ["qwen2", "mistral-sliding", "deepseek-v3"])
def test_a_shared_prefix_is_read_once_and_right(family: str, how: str, load_family: LoadFamily) -> None:
    """Requests over one prefix, branching in two levels: decodes and chunks that share blocks."""
    path, model = load_family(family, "float32", how)
    root, *branches = random_prompts(64, 40, 40)
    tails = random_prompts(5, 9, 6, 20, seed=1)
    prompts = [root + branches[i // 2] + tail for i, tail in enumerate(tails)]
    run = PagedSequences(model, prompts)
    run.step([(0, 104)])
    run.reuse(0, 1, 104)
    run.reuse(0, 2, 64)
    run.step([(2, 40)])
    run.reuse(2, 3, 104)
    run.step([(0, 1), (1, 1), (2, 1), (3, 15)])
    run.finish(chunk=1)
    for prompt, logits in zip(prompts, run.logits, strict=True):
        torch.testing.assert_close(logits, plain_logits(path, prompt), atol=FP32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", [NATIVE, MODULES])
@pytest.mark.parametrize("family", ["qwen2", "mistral-sliding", "qwen3-moe", "deepseek-v3"])
def test_wanted_rows_are_those_of_all(family: str, how: str, dtype: str, load_family: LoadFamily) -> None:
    """`logits_rows` picks rows, bit for bit; none at all included (a chunk in the middle of a prompt).

    Behind the last layer only these rows are computed: of prompts, decodes, and decodes over a shared prefix,
    whose attention is split by keys and merged.
    """
    _, model = load_family(family, dtype, how)
    root, *tails = random_prompts(520, 9, 5, 40)
    prompts = [root + tail for tail in tails]

    def run(wanted: Sequence[list[int] | None]) -> list[torch.Tensor]:
        sequences = PagedSequences(model, prompts)
        logits = [sequences.step([(0, 300)], wanted[0]), sequences.step([(0, 220)], wanted[1])]
        for other in (1, 2):
            sequences.reuse(0, other, 520)
        logits.append(sequences.step([(0, 1), (1, 1), (2, 25)], wanted[2]))
        logits.append(sequences.step([(0, 2), (1, 1), (2, 1)], wanted[3]))
        return logits

    wanted: list[list[int]] = [[], [3, 150, 219], [26, 1], [2]]
    for rows, some, every in zip(wanted, run(wanted), run([None] * 4), strict=True):
        assert some.shape == (len(rows), model.vocab_size)
        assert torch.equal(some, every[rows])
