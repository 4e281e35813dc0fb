"""Models with recurrent layers, bit for bit: logits in any schedule, answers from any tier, drafted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stemma.config.settings import ModelSettings
from stemma.engine.sampling.params import SamplingParams
from stemma.model.load.loading import load_model
from stemma.native.library import load_kernels
from stemma.types import Tier
from tests import hybrids
from tests.checkpoints import build
from tests.invariance.schedules import check_schedules
from tests.invariance.serving import NO_CACHE, answer_of, check_family, engine
from tests.native.isa import level_params

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")

DTYPES = ("bfloat16", "float32")
ENGINES = (
    *("qwen3_next", "granitemoehybrid", "lfm2", "mamba"),
    *("gemma4_text", "llama4_text", "glm_moe_dsa", "deepseek_v4"),
)
"""One of each kind of recurrence; windows of another shape, chunks, chosen tokens, entries."""
SLOW_STEPS = ("llama4_text", "glm_moe_dsa", "deepseek_v4")
"""Two conversations show in some seconds what three show in twice as many."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


def checkpoint(family: str, root: Path) -> Path:
    path = root / family
    return path if path.exists() else hybrids.build(family, path)


def settings_of(path: Path, **fields: Any) -> ModelSettings:
    return ModelSettings(path=path, device="cpu", **fields)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", hybrids.ALL)
def test_any_schedule(family: str, dtype: str, root: Path) -> None:
    settings = settings_of(checkpoint(family, root), dtype=dtype)
    check_schedules(load_model(settings), 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW_STEPS)) for one in ENGINES]
)
def test_any_way_of_serving(family: str, root: Path, tmp_path: Path) -> None:
    check_family(checkpoint(family, root), "float32", tmp_path, 2 if family in SLOW_STEPS else 3)


SLOW_DRAFTS = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_text", "qwen3_5_moe_text")]


@pytest.mark.parametrize("family", ["qwen3_next", *SLOW_DRAFTS])
def test_drafts_of_the_models_own_layer_roll_states_back(family: str, root: Path, tmp_path: Path) -> None:
    path = hybrids.build_mtp(root / f"{family}-mtp", family)
    check_family(path, "float32", tmp_path, 2)


ROLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both": ({"role": "both"}, {"role": "both"}),
    "decode": ({"role": "prefill"}, {"role": "decode"}),
    "decode-uncached": ({"role": "prefill"}, {"role": "decode", "enable_prefix_cache": False}),
}


def roles_of_families() -> list[Any]:
    """Return all pairs; those are quick in which each family stands twice at most, and each role."""
    families = ("qwen3_next", "gpt-oss", "mistral-sliding", "deepseek_v4")
    quick = {("gpt-oss", "both"), ("mistral-sliding", "decode"), ("deepseek_v4", "decode")}
    quick |= {("qwen3_next", role) for role in ("both", "decode-uncached")}
    return [
        pytest.param(family, role, marks=() if (family, role) in quick else pytest.mark.slow)
        for family in families
        for role in ROLES
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "role"), roles_of_families())
def test_checkpoints_travel_through_a_pool(family: str, role: str, root: Path, tmp_path: Path) -> None:
    """gpt-oss, mistral-sliding: pages of windows; deepseek_v4: entries beside them."""
    first, second = ROLES[role]
    is_plain = family in ("gpt-oss", "mistral-sliding")
    path = build(family, tmp_path / family) if is_plain else checkpoint(family, root)
    config = tmp_path / "pool.json"
    (tmp_path / "pool").mkdir()
    config.write_text(json.dumps({"path": str(tmp_path / "pool")}))
    pool = {"pool": "directory", "pool_config": str(config), "load_when": "always"}
    prompt = [3 + 11 * number % 480 for number in range(300)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=2)
    with engine(path, "float32", **NO_CACHE) as llm:
        expected = answer_of(llm.generate([prompt], params)[0])
    with engine(path, "float32", **pool, **first) as llm:
        llm.generate([prompt], params if first["role"] == "both" else replace(params, max_tokens=1))
    with engine(path, "float32", **pool, **second) as llm:
        generation = llm.generate([prompt], params)[0]
    assert answer_of(generation) == expected
    assert generation.cache.cached_by_tier == {Tier.POOL: 256}
    assert generation.cache.miss_reason == "no_state"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", hybrids.ALL)
def test_any_way_of_serving_all(family: str, dtype: str, root: Path, tmp_path: Path) -> None:
    check_family(checkpoint(family, root), dtype, tmp_path, 8)


@pytest.mark.slow
@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("family", hybrids.FAMILIES)
def test_any_schedule_at_every_level(family: str, isa: str, root: Path) -> None:
    settings = settings_of(checkpoint(family, root), dtype="bfloat16", isa=isa)
    check_schedules(load_model(settings), 5)
