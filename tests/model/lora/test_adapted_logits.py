"""Logits with adapters equal those of the model that PEFT merges, for every family and way to run it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests import checkpoints
from tests.adapters import ATTENTION, GATED, build_adapter, merged_logits, write_adapter
from tests.model.conftest import MODULES, NATIVE, TORCH, LoadFamily
from tests.model.paging import PagedSequences, plain_logits
from tests.native.isa import level_params
from transformers import AutoModelForCausalLM, PhimoeConfig

from stemma.config.settings import ModelSettings
from stemma.model.files.tiny import save_checkpoint
from stemma.model.load.loading import load_model
from stemma.model.lora.reading import read_adapter
from stemma.model.opened.causal_lm import CausalLM
from stemma.native.library import load_kernels

pytest.importorskip("peft", reason="PEFT is the oracle")

TARGETS: dict[str, tuple[str, ...]] = {
    "llama": (*ATTENTION, *GATED),
    "qwen2": (*ATTENTION, *GATED),
    "qwen3": (*ATTENTION, *GATED),
    "smollm3": (*ATTENTION, *GATED),
    "mistral-sliding": (*ATTENTION, *GATED),
    "qwen3-moe": ATTENTION,
    "gemma2": (*ATTENTION, *GATED),
    "gemma3": (*ATTENTION, *GATED),
    "deepseek-v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "deepseek-v2": ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
    "gpt-oss": ATTENTION,
}
"""What an adapter of each family may touch."""
TOKENS = [random.Random(0).randrange(3, 500) for _ in range(45)]


def test_a_router_that_returns_several_tensors_is_no_linear_layer(tmp_path: Path) -> None:
    """Phi-3.5-MoE's router is a subclass of a linear layer, and returns weights and choices."""
    config = PhimoeConfig(
        **checkpoints.base_fields(intermediate_size=48, num_local_experts=4, num_experts_per_tok=2)
    )
    path = save_checkpoint(checkpoints.make_model(config, 0), checkpoints.tokenizer(), tmp_path / "phimoe")
    model = load_model(ModelSettings(path=path, dtype="float32", device="cpu"))
    run = PagedSequences(model, [TOKENS], block_size=8)
    run.finish(chunk=16)
    torch.testing.assert_close(run.logits[0], plain_logits(path, TOKENS), atol=1e-4, rtol=0)
    assert not [name for name in model.adaptable if "router" in name]


def load_adapter(model: CausalLM, path: Path) -> object:
    return model.prepare_adapter(read_adapter(path, model.adaptable, max_rank=64))


def logits_with(model: CausalLM, adapter: object | None, tokens: list[int], chunk: int = 17) -> torch.Tensor:
    run = PagedSequences(model, [tokens], adapters=[adapter])
    run.finish(chunk)
    return run.logits[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", [NATIVE, MODULES, TORCH])
@pytest.mark.parametrize("family", TARGETS)
def test_equal_to_merged_in_float32(family: str, way: str, load_family: LoadFamily, tmp_path: Path) -> None:
    checkpoint, model = load_family(family, "float32", way)
    path = build_adapter(checkpoint, tmp_path / "adapter", TARGETS[family])
    expected = merged_logits(checkpoint, path, TOKENS)
    assert (expected - plain_logits(checkpoint, TOKENS)).abs().max() > 0.1  # it does something
    logits = logits_with(model, load_adapter(model, path), TOKENS)
    torch.testing.assert_close(logits, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("way", [NATIVE, TORCH])
def test_shared_experts(way: str, load_family: LoadFamily, tmp_path: Path) -> None:
    """Dense layers and shared experts, merged by hand: PEFT would adapt the routed ones too."""
    checkpoint, model = load_family("deepseek-v3", "float32", way)
    layers = [f"model.layers.0.mlp.{name}" for name in GATED]
    layers += [f"model.layers.{i}.mlp.shared_experts.{name}" for i in (1, 2) for name in GATED]
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    matrices = {}
    for layer in layers:
        weight = plain.get_submodule(layer).weight
        assert isinstance(weight, torch.Tensor)
        down, up = torch.randn(4, weight.shape[1]) * 0.1, torch.randn(weight.shape[0], 4) * 0.1
        matrices[layer] = down, up
        weight.data += 2.0 * up @ down
    path = write_adapter(tmp_path / "adapter", matrices, r=4, lora_alpha=8)
    with torch.inference_mode():
        expected = plain.eval()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    logits = logits_with(model, load_adapter(model, path), TOKENS)
    torch.testing.assert_close(logits, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3", "gemma2", "gemma3"])
def test_equal_to_merged_in_bfloat16(family: str, load_family: LoadFamily, tmp_path: Path) -> None:
    """No further from the exact result than the merged model, whose weights are rounded, is itself."""
    checkpoint, model = load_family(family, "bfloat16")
    path = build_adapter(checkpoint, tmp_path / "adapter", TARGETS[family], rank=3)
    exact = merged_logits(checkpoint, path, TOKENS)
    merged = merged_logits(checkpoint, path, TOKENS, torch.bfloat16)
    logits = logits_with(model, load_adapter(model, path), TOKENS)
    assert (logits - exact).norm() < 1.5 * (merged - exact).norm()


@pytest.mark.one_in(3)
@pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("isa", level_params())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_adapters_in_one_batch(
    family: str, dtype: str, isa: str, load_family: LoadFamily, tmp_path: Path
) -> None:
    """Alone, beside others and without adapter: the same bits."""
    checkpoint, model = load_family(family, dtype, isa=isa)
    adapters = [
        None,
        *(
            load_adapter(
                model, build_adapter(checkpoint, tmp_path / str(seed), targets, seed=seed, rank=rank)
            )
            for seed, (targets, rank) in enumerate(
                [((*ATTENTION, *GATED), 5), (("q_proj", "v_proj"), 33), (("gate_proj",), 20)]
            )
        ),
    ]
    chosen = [adapters[i] for i in (0, 1, 2, 1, 3, 0)]
    prompts = [[random.Random(n).randrange(3, 500) for _ in range(20 + 61 * n)] for n in range(len(chosen))]
    prompts[3][:20] = prompts[1][:20]
    alone = [logits_with(model, a, p, chunk=len(p)) for a, p in zip(chosen, prompts, strict=True)]
    for threads, chunk in ((1, 7), (2, 64), (2, 330)):
        torch.set_num_threads(threads)
        try:
            together = PagedSequences(model, prompts, adapters=chosen)
            together.finish(chunk)
        finally:
            torch.set_num_threads(1)
        for one, other in zip(alone, together.logits, strict=True):
            assert one.equal(other)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rslora_and_patterns(family: str, load_family: LoadFamily, tmp_path: Path) -> None:
    checkpoint, model = load_family(family, "float32")
    path = build_adapter(
        checkpoint,
        tmp_path / "adapter",
        r".*self_attn\.(q|v)_proj",
        use_rslora=True,
        rank_pattern={"v_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 3},
    )
    expected = merged_logits(checkpoint, path, TOKENS)
    logits = logits_with(model, load_adapter(model, path), TOKENS)
    torch.testing.assert_close(logits, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)
