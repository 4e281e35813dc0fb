"""Answers and log-probabilities, bit for bit: from any tier, in any batch, preempted, drafted, forked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stemma.config.settings import KVDtype
from stemma.engine.sampling.params import SamplingParams
from stemma.native.levels import available_levels
from stemma.native.library import load_kernels
from tests.checkpoints import build, build_mtp
from tests.invariance.serving import MTP, NO_CACHE, answer_of, asks_of, check_family, engine

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

FAMILIES = ("qwen2", "qwen3-moe", "deepseek-v3", "mistral-sliding", "gpt-oss")
DTYPES = ("bfloat16", "float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("invariance")

    def make(family: str) -> Path:
        path = root / family
        if path.exists():
            return path
        return build_mtp(path) if family == MTP else build(family, path)

    return make


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen2", "bfloat16"), ("deepseek-v3", "float32"), (MTP, "bfloat16")]
)
def test_answers(family: str, dtype: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    check_family(checkpoint(family), dtype, tmp_path / "disk", 2 if family == MTP else 3)


@pytest.mark.slow
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
