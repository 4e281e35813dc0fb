"""Logits of every served family, bit for bit: what was cached, chunked or batched can't be seen in them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stemma.config.settings import KVDtype, ModelSettings
from stemma.model.causal_lm import CausalLM
from stemma.model.loading import load_model
from stemma.native.library import load_kernels
from tests.checkpoints import FAMILIES, build
from tests.model.conftest import LoadFamily
from tests.model.paging import PagedSequences, plain_logits
from tests.native.isa import level_params

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

DTYPES = ("bfloat16", "float32")
CODES: tuple[KVDtype, ...] = ("int8", "fp8")
CODED_FAMILIES = ("qwen2", "deepseek-v3", "mistral-sliding", "gemma2", "gpt-oss")
BLOCK_SIZES = (1, 8, 16, 24, 64)
PROMPT = 330
"""Tokens: more than a split of attention's keys."""


def prompts_of(lengths: list[int], shared: list[int]) -> list[list[int]]:
    """Prompts of these lengths; each begins with so many tokens of the first."""
    first = [random.Random(0).randrange(3, 500) for _ in range(PROMPT)]
    return [
        first[:common] + [random.Random(number).randrange(3, 500) for _ in range(length - common)]
        for number, (length, common) in enumerate(zip(lengths, shared, strict=True), start=1)
    ]


def check_schedules(model: CausalLM, num_examples: int, kv_dtype: KVDtype = "auto") -> None:
    """Any schedule gives each prompt the logits that it has when it is computed alone and at once."""

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        num_prompts = data.draw(st.integers(1, 4), label="prompts")
        lengths = data.draw(
            st.lists(st.integers(2, PROMPT), min_size=num_prompts, max_size=num_prompts), label="lengths"
        )
        shared = [data.draw(st.integers(0, length - 1), label="shared") for length in lengths]
        prompts = prompts_of(lengths, shared)
        expected = [PagedSequences(model, [prompt], kv_dtype=kv_dtype) for prompt in prompts]
        for alone in expected:
            alone.finish(chunk=PROMPT)
        before = torch.get_num_threads()
        torch.set_num_threads(data.draw(st.sampled_from((1, 2)), label="threads"))
        try:
            block_size = data.draw(st.sampled_from(BLOCK_SIZES), label="block size")
            run = PagedSequences(model, prompts, block_size=block_size, kv_dtype=kv_dtype)
            run_schedule(run, data, shared)
        finally:
            torch.set_num_threads(before)
        for alone, logits in zip(expected, run.logits, strict=True):
            assert logits.equal(alone.logits[0])

    check()


def run_schedule(run: PagedSequences, data: st.DataObject, shared: list[int]) -> None:
    """Steps of any mix; a prompt may begin with what another one has computed."""
    waiting = set(range(1, len(shared)))
    seed = random.Random(data.draw(st.integers(0, 1 << 30), label="schedule"))
    while any(done < len(prompt) for done, prompt in zip(run.done, run.prompts, strict=True)):
        for target in sorted(waiting):
            if run.done[target] == 0 and seed.random() < 0.5:
                waiting.discard(target)
                common = min(shared[0], shared[target], run.done[0])
                if common and seed.random() < 0.7:
                    run.reuse(0, target, common)
        plan = []
        for number, prompt in enumerate(run.prompts):
            left = len(prompt) - run.done[number]
            if number in waiting or left == 0 or seed.random() < 0.2:
                continue
            plan.append((number, min(left, seed.choice((1, 1, 2, 7, 16, 33, 100, PROMPT)))))
        seed.shuffle(plan)
        if plan:
            run.step(plan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_schedule(family: str, dtype: str, load_family: LoadFamily) -> None:
    check_schedules(load_family(family, dtype)[1], 2)


@pytest.mark.parametrize("kv_dtype", CODES)
@pytest.mark.parametrize("family", CODED_FAMILIES)
def test_any_schedule_over_codes(family: str, kv_dtype: KVDtype, load_family: LoadFamily) -> None:
    """A query sees the codes of every token, whether its own step wrote them or they were cached."""
    check_schedules(load_family(family, "bfloat16")[1], 2, kv_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tied_head(dtype: str, tmp_path: Path) -> None:
    """A model that runs through its modules, its output head tied to the embedding."""
    path = build("gemma2", tmp_path / "tied", tie_word_embeddings=True)
    model = load_model(ModelSettings(path=path, dtype=dtype, device="cpu"))
    check_schedules(model, 2)
    if dtype == "float32":
        prompt = prompts_of([40], [0])[0]
        run = PagedSequences(model, [prompt])
        run.finish(chunk=17)
        torch.testing.assert_close(run.logits[0], plain_logits(path, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2", "deepseek-v3", "gpt-oss"])
def test_any_schedule_with_quantized_weights(family: str, quantize: str, load_family: LoadFamily) -> None:
    check_schedules(load_family(family, "bfloat16", quantize=quantize)[1], 2)


@pytest.mark.slow
@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_any_schedule_with_quantized_weights_at_every_level(
    family: str, quantize: str, isa: str, load_family: LoadFamily
) -> None:
    check_schedules(load_family(family, "bfloat16", isa=isa, quantize=quantize)[1], 10)


@pytest.mark.slow
@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_schedule_at_every_level(family: str, dtype: str, isa: str, load_family: LoadFamily) -> None:
    for kv_dtype in ("auto", *CODES):
        check_schedules(load_family(family, dtype, isa=isa)[1], 20, kv_dtype)
