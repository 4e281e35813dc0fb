"""Recurrent models on several ranks: states are divided by heads, and lie in all tiers and in the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stemma import LLM, SamplingParams
from stemma.engine.offline import Generation
from stemma.prefix.keys import Namespace
from stemma.types import Tier
from tests import hybrids
from tests.engine.ranks.checks import (
    GREEDY,
    LONG,
    OTHER,
    SMALL,
    TIERS,
    bits,
    directory_pool,
    in_one_process,
    same_as_one_process,
    tokens,
)

PROMPT = [(11 * i * i + 5 * i) % 400 + 3 for i in range(150)]
LONGER = [*PROMPT, *range(20, 40)]
CHECKPOINT = 128
"""The deepest multiple of 64 tokens in the prompt."""
ROOM: dict[str, Any] = {"kv_cache_memory": "4MB"}
DIVIDED: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_key_value_heads": 4, "linear_num_key_heads": 4},
    "qwen3_5_text": {"num_key_value_heads": 4, "linear_num_key_heads": 4},
    "qwen3_5_moe_text": {"num_key_value_heads": 4, "linear_num_key_heads": 4},
    "granitemoehybrid": {"num_key_value_heads": 4, "mamba_n_groups": 1},
    "bamba": {"num_key_value_heads": 4, "mamba_n_groups": 4},
    "nemotron_h": {"num_key_value_heads": 4, "n_groups": 1},
    "lfm2": {"num_key_value_heads": 4, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"num_key_value_heads": 4},
    "olmo_hybrid": {"num_key_value_heads": 4, "linear_value_head_dim": 16},
    "kimi_linear": {},
    "minimax": {"num_key_value_heads": 4},
    "mamba": {},
    "falcon_mamba": {},
    "mamba2": {"n_groups": 1},
    "jamba": {"num_key_value_heads": 4},
    "falcon_h1": {"num_key_value_heads": 4, "mamba_n_groups": 1, "mamba_rms_norm": True}
    | {"mamba_norm_before_gate": False, "ssm_multipliers": [0.5, 2.0, 0.8, 1.2, 1.5]},
}
"""By `model_type`: fields that four ranks divide."""


@pytest.fixture(
    scope="module", params=["qwen3_next", pytest.param("granitemoehybrid", marks=pytest.mark.slow)]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return hybrids.build(family, tmp_path_factory.mktemp(family), **DIVIDED[family])


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """An engine of two ranks, with a disk."""
    settings = SMALL | ROOM | TIERS | {"disk_cache": model.parent / f"{model.name}-disk"}
    llm = LLM(model, tensor_parallel_size=2, host_cache="4MB", **settings)
    yield llm
    llm.close()


def uncached(llm: LLM, prompt: list[int]) -> Generation:
    found = llm.generate(prompt, GREEDY, namespace=Namespace(salt="nobody's"))[0]
    assert found.cache.num_cached_tokens == 0
    return found


@pytest.mark.slow
def test_the_text_is_that_of_one_process_and_hits_have_its_bits(llm: LLM, model: Path) -> None:
    alone = LLM(model, **SMALL | ROOM)
    expected = [tokens(found) for found in alone.generate([PROMPT, LONGER], GREEDY)]
    alone.close()
    first = llm.generate(PROMPT, GREEDY)[0]
    found = llm.generate(LONGER, GREEDY)[0]
    assert found.cache.num_cached_tokens == CHECKPOINT
    assert [tokens(first), tokens(found)] == expected
    assert bits(found) == bits(uncached(llm, LONGER))
    llm.engine.check()


@pytest.mark.slow
def test_states_come_back_from_lower_tiers_on_all_ranks(llm: LLM) -> None:
    expected = bits(llm.generate(PROMPT, GREEDY)[0])
    assert llm.engine.cache.below.drain(20.0)
    llm.engine.cache.flush()
    found = llm.generate(PROMPT, GREEDY)[0]
    assert found.cache.num_cached_tokens == CHECKPOINT
    assert found.cache.cached_by_tier.get(Tier.DEVICE, 0) == 0
    assert bits(found) == expected
    transfer = llm.stats().transfer
    assert transfer is not None
    assert transfer.missing_by_rank == {0: 0, 1: 0}
    llm.engine.check()


def test_rejected_drafts_and_siblings_go_back_to_their_states(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=4, temperature=0.0, ignore_eos=True)
    answers = llm.generate(PROMPT, params)[0].completions
    assert len({tuple(one.token_ids) for one in answers}) == 1
    llm.engine.check()


@pytest.mark.slow  # test_ranks.py restarts two ranks, and above states come back from lower tiers
def test_a_restart_is_warm(model: Path) -> None:
    settings = SMALL | ROOM | TIERS | {"disk_cache": model.parent / f"{model.name}-restarted"}
    expected: list[tuple[int, float]] = []
    for _ in range(2):
        llm = LLM(model, tensor_parallel_size=2, **settings)
        found = llm.generate(PROMPT, GREEDY)[0]
        assert found.cache.cached_by_tier == ({Tier.DISK: CHECKPOINT} if expected else {})
        assert bits(found) == (expected or bits(found))
        expected = bits(found)
        llm.engine.check()
        llm.close()


@pytest.mark.slow
def test_a_decode_server_goes_on_from_the_states_of_a_prefill_server(model: Path, tmp_path: Path) -> None:
    settings = SMALL | ROOM | TIERS | directory_pool(tmp_path) | {"tensor_parallel_size": 2}
    prefill = LLM(model, role="prefill", **settings)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    prefill.generate(PROMPT, one)
    assert prefill.engine.cache.below.drain(20.0)
    decode = LLM(model, role="decode", enable_prefix_cache=False, **settings)
    found = decode.generate(PROMPT, GREEDY)[0]
    assert found.cache.cached_by_tier == {Tier.POOL: CHECKPOINT}
    assert bits(found) == bits(uncached(prefill, PROMPT))
    for llm in (prefill, decode):
        llm.engine.check()
        llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", DIVIDED)
def test_families(family: str, size: int, tmp_path: Path) -> None:
    checkpoint = hybrids.build(family, tmp_path / "model", **DIVIDED[family])
    expected = in_one_process(checkpoint, **ROOM)
    llm = LLM(checkpoint, tensor_parallel_size=size, **SMALL | ROOM)
    first = llm.generate(PROMPT, GREEDY)[0]
    found = llm.generate(PROMPT, GREEDY)[0]
    assert found.cache.num_cached_tokens == CHECKPOINT
    assert bits(found) == bits(first)
    assert [tokens(one) for one in llm.generate([LONG, OTHER], GREEDY)] == expected
    llm.engine.check()
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"quantize": "int8", "quantize_group_size": 32}, {"speculation": "la"}])
@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid"])
def test_other_settings(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"intermediate_size": 128, "shared_intermediate_size": 64}
    if family == "qwen3_next":
        sizes = {"intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        sizes["linear_value_head_dim"] = 16
    checkpoint = hybrids.build(family, tmp_path, **DIVIDED[family] | sizes)
    same_as_one_process(checkpoint, {"tensor_parallel_size": 2}, settings | ROOM)
