"""Logits of every served family, bit for bit: what was cached, chunked or batched can't be seen in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stemma.config.settings import KVDtype, ModelSettings
from stemma.model.load.loading import load_model
from stemma.native.library import load_kernels
from tests.checkpoints import FAMILIES, build
from tests.invariance.schedules import check_schedules, prompts_of
from tests.model.conftest import LoadFamily
from tests.model.paging import PagedSequences, plain_logits
from tests.native.isa import level_params

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

DTYPES = ("bfloat16", "float32")
CODES: tuple[KVDtype, ...] = ("int8", "fp8")
CODED_FAMILIES = ("qwen2", "smollm3", "deepseek-v3", "mistral-sliding", "gemma2", "gemma3", "gpt-oss")


@pytest.mark.one_in(3)
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
    model = load_model(ModelSettings.model_validate({"path": path, "dtype": dtype, "device": "cpu"}))
    check_schedules(model, 2)
    if dtype == "float32":
        prompt = prompts_of([40], [0])[0]
        run = PagedSequences(model, [prompt])
        run.finish(chunk=17)
        torch.testing.assert_close(run.logits[0], plain_logits(path, prompt), atol=1e-4, rtol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2", "gemma3", "deepseek-v3", "gpt-oss"])
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
