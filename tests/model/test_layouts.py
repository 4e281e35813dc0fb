"""A family's layout names just the tensors that transformers writes for a model of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stemma.model.cpu.heads import kv_shape_of
from stemma.model.families.layout import Norm
from stemma.model.families.registry import FAMILIES, contained_layout
from stemma.model.files.directory import stored_tensors
from stemma.model.foreign.attention import use_paged_attention
from stemma.model.foreign.latent import cache_latents
from stemma.model.foreign.probe import probe
from tests import checkpoints, hybrids

BUILT = {
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-v3",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "llama": "llama",
    "mistral": "mistral-sliding",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3-moe",
    "seed_oss": "seed-oss",
    "smollm3": "smollm3",
}


RECURRENT = {
    model_type: layer
    for model_type, layer in (
        *(
            ("qwen3_next", "linear_attn"),
            ("qwen3_5_text", "linear_attn"),
            ("qwen3_5_moe_text", "linear_attn"),
        ),
        *(("granitemoehybrid", "mamba"), ("bamba", "mamba")),
    )
}
"""Families with recurrent layers, and what transformers calls these."""


def build(model_type: str, path: Path) -> Path:
    if model_type in RECURRENT:
        return hybrids.build(model_type, path)
    return checkpoints.build(BUILT[model_type], path)


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in stored_tensors(path)}


def test_every_family_with_a_layout_is_tested() -> None:
    behind_vision = {"qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}  # tests/model/vision
    assert {family.model_type for family in FAMILIES if family.layout is not None} == {
        *BUILT,
        *RECURRENT,
        *behind_vision,
    }


@pytest.mark.parametrize("model_type", [*BUILT, *RECURRENT])
def test_a_layout_names_all_tensors(model_type: str, tmp_path: Path) -> None:
    path = build(model_type, tmp_path)
    config, shapes = AutoConfig.from_pretrained(path), shapes_of(path)
    layout = contained_layout(config, torch.bfloat16, shapes)
    assert layout is not None
    assert layout.shapes() == shapes


@pytest.mark.parametrize("model_type", BUILT)
def test_layers_attend_and_norm_as_transformers_modules_do(model_type: str, tmp_path: Path) -> None:
    path = checkpoints.build(BUILT[model_type], tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    layout = contained_layout(AutoConfig.from_pretrained(path), torch.float32, shapes_of(path))
    assert layout is not None
    use_paged_attention(model)
    cache_latents(model)
    _, calls = probe(model)
    assert [(call.scaling, call.sliding_window, call.rotates) for call in calls] == [
        (layer.scaling, layer.window, layer.rotates) for layer in layout.layers
    ]
    norms: list[Norm | None] = [layout.norm]
    for layer in layout.layers:
        norms += [layer.input_norm, layer.post_norm, *(layer.head_norms or ()), *(layer.out_norms or ())]
        norms += [layer.latent.norm, layer.latent.query_norm] if layer.latent else []
    for norm in norms:
        if norm is not None:
            module = model.get_submodule(norm.name)
            eps = module.eps if model_type == "gemma3_text" else module.variance_epsilon
            assert eps == norm.eps
    some, positions = torch.empty(0), torch.arange(40)[None]
    if model_type == "gemma3_text":
        assert layout.local_angles is not None
        for make, kind in ((layout.angles, "full_attention"), (layout.local_angles, "sliding_attention")):
            own, theirs = make()(some, positions), model.model.rotary_emb(some, positions, kind)
            assert torch.equal(torch.stack(list(own)), torch.stack(list(theirs)))
        assert [layer.is_local for layer in layout.layers] == [True, False]
        return
    own, theirs = layout.angles()(some, positions), model.model.rotary_emb(some, positions)
    if model_type == "gpt_oss":  # its module gives each angle once
        theirs = [torch.cat((half, half), dim=-1) for half in theirs]
    assert torch.equal(torch.stack(list(own)), torch.stack(list(theirs)))


@pytest.mark.parametrize("model_type", RECURRENT)
def test_states_are_those_that_the_modules_keep(model_type: str, tmp_path: Path) -> None:
    path = build(model_type, tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    layout = contained_layout(AutoConfig.from_pretrained(path), torch.float32, shapes_of(path))
    assert layout is not None
    use_paged_attention(model)
    kv_shape, calls = probe(model)
    own = kv_shape_of(layout)
    assert own == kv_shape
    with_attention = [layer for layer in layout.layers if layer.recurrent is None]
    assert [call.scaling for call in calls] == [layer.scaling for layer in with_attention]
    assert [RECURRENT[model_type] in layer.output.name for layer in layout.layers] == [
        layer.recurrent is not None for layer in layout.layers
    ]


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "deepseek_v3"])
def test_a_tensor_more_or_less_fits_no_layout(model_type: str, tmp_path: Path) -> None:
    path = checkpoints.build(BUILT[model_type], tmp_path)
    config, shapes = AutoConfig.from_pretrained(path), shapes_of(path)
    some = next(iter(shapes))
    assert contained_layout(config, torch.bfloat16, {**shapes, "more": (2, 2)}) is not None
    assert contained_layout(config, torch.bfloat16, {n: s for n, s in shapes.items() if n != some}) is None
    assert contained_layout(config, torch.bfloat16, {**shapes, some: (2, 2)}) is None
    assert contained_layout(config, torch.float16, shapes) is None


@pytest.mark.parametrize(
    ("model_type", "field"), [("qwen3_moe", "num_experts"), ("deepseek_v3", "n_routed_experts")]
)
def test_counts_beyond_the_files_tensors_cost_no_time(model_type: str, field: str, tmp_path: Path) -> None:
    path = checkpoints.build(BUILT[model_type], tmp_path)
    config, shapes = AutoConfig.from_pretrained(path), shapes_of(path)
    config.num_hidden_layers = len(shapes)
    setattr(config, field, 4096)
    assert contained_layout(config, torch.bfloat16, shapes) is None
