"""What each rank reads of a checkpoint, and what can't be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from stemma.config.settings import ModelSettings
from stemma.errors import ConfigError, UnsupportedModel
from stemma.model.families.cuts import plain_cuts
from stemma.model.families.registry import cuts_of
from stemma.model.opened.checkpoint_config import load_config
from stemma.model.parallel.cutting import check_cut, read_share
from stemma.model.parallel.share import Cut, Share, check_share, cut_of, num_experts_of
from tests import hybrids
from tests.checkpoints import CONFIGS, build
from tests.quantized_files import gptq, rewrite


def shares(size: int, expert_size: int = 1) -> list[Share]:
    return [Share(rank, size, expert_size) for rank in range(size)]


def joined(shape: tuple[int, ...], cuts: list[Cut], parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the tensor that the parts of all ranks make, which agree where they overlap."""
    whole = torch.full(shape, torch.nan)
    for cut, part in zip(cuts, parts, strict=True):
        runs = [cut.parts.get(axis, (range(size),)) for axis, size in enumerate(shape)]
        places = torch.meshgrid(
            *(torch.tensor([at for run in axis for at in run]) for axis in runs), indexing="ij"
        )
        known = whole[places]
        assert torch.equal(known[~known.isnan()], part[~known.isnan()])
        whole[places] = part
    return whole


@pytest.mark.parametrize(
    ("family", "size", "expert_size"),
    [
        *(("qwen2", 2, 1), ("deepseek-v3", 4, 2), ("qwen3-moe", 2, 2)),
        *(("qwen3_next", 2, 2), ("qwen3_5_moe_text", 2, 1), ("granitemoehybrid", 2, 2), ("bamba", 2, 1)),
        *(("nemotron_h", 2, 2), ("lfm2_moe", 2, 1), ("kimi_linear", 2, 2)),
        *(("mamba", 4, 1), ("falcon_mamba", 2, 1), ("mamba2", 2, 1), ("jamba", 2, 2), ("falcon_h1", 2, 1)),
    ],
)
def test_the_parts_are_the_whole(family: str, size: int, expert_size: int, tmp_path: Path) -> None:
    path = hybrids.build(family, tmp_path) if family in hybrids.FIELDS else build(family, tmp_path)
    whole = load_file(path / "model.safetensors")
    config = AutoConfig.from_pretrained(path)
    num_experts = num_experts_of(config)
    ranks = shares(size, expert_size)
    how = cuts_of(family, config, size)
    parts = [read_share(path, share, how, num_experts) for share in ranks]
    for name, tensor in whole.items():
        shape = tuple(tensor.shape)
        cuts = [cut_of(name, shape, share, how, num_experts) for share in ranks]
        held = [(cut, part[cut.name]) for cut, part in zip(cuts, parts, strict=True) if cut is not None]
        assert all(part.shape == cut.shape(shape) for cut, part in held)
        assert torch.equal(joined(shape, [cut for cut, _ in held], [part for _, part in held]), tensor), name
    if ".experts." in "".join(whole):
        assert any(".experts.0." in name for name in parts[-1])  # counted from 0 on every rank
    read = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert max(read) < 0.8 * sum(tensor.nbytes for tensor in whole.values())


def test_norms_that_come_before_gates_are_whole() -> None:
    fields = {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_n_groups": 1}
    with pytest.raises(UnsupportedModel, match="mamba_norm_before_gate and one group isn't cut"):
        cuts_of("", hybrids.config_of("falcon_h1", **fields), 2)


def test_one_rank_adds_the_bias() -> None:
    name = "model.layers.0.self_attn.o_proj.bias"
    cuts = [cut_of(name, (64,), share, plain_cuts(None, 2), 0) for share in shares(2)]
    assert [cut is not None and cut.is_zero for cut in cuts] == [False, True]


def test_what_one_group_of_heads_shares_is_whole_on_every_rank(tmp_path: Path) -> None:
    path = hybrids.build("granitemoehybrid", tmp_path, mamba_n_groups=1)
    cuts = cuts_of("", AutoConfig.from_pretrained(path), 2)
    name = "model.layers.0.mamba.conv1d.weight"
    cut = cut_of(name, (160, 1, 4), Share(1, 2), cuts, 0)
    assert cut is not None
    assert cut.parts == {0: (range(64, 128), range(128, 144), range(144, 160))}


def test_states_are_not_divided_by_tokens(tmp_path: Path) -> None:
    config = hybrids.config_of("qwen3_next")
    with pytest.raises(UnsupportedModel, match="isn't served with context_parallel_size"):
        check_share("Qwen3NextForCausalLM", config, Share(0, 1, context_size=2))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3_next", {"linear_num_key_heads": 1}, r"key heads of recurrent layers \(1\)"),
        ("granitemoehybrid", {"mamba_n_heads": 9}, r"heads of recurrent layers \(9\)"),
        ("bamba", {"mamba_n_groups": 3}, r"groups of recurrent layers \(3\)"),
        ("mamba2", {"num_heads": 9}, r"heads of recurrent layers \(9\)"),
        ("mamba", {"intermediate_size": 129}, r"intermediate_size \(129\)"),
        ("kimi_linear", {"linear_num_heads": 3}, r"heads of recurrent layers \(3\)"),
        ("granitemoehybrid", {"shared_intermediate_size": 47}, r"shared_intermediate_size \(47\)"),
    ],
)
def test_states_that_dont_divide(family: str, fields: dict[str, Any], message: str) -> None:
    config = hybrids.config_of(family)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=message):
        check_share("", config, Share(0, 2))


@pytest.mark.parametrize(
    ("family", "fields", "share", "message"),
    [
        ("llama", {}, Share(0, 3), "tensor_parallel_size 3 doesn't divide .* attention heads \\(4\\)"),
        ("llama", {}, Share(0, 4), "tensor_parallel_size 4 doesn't divide .* KV heads \\(2\\)"),
        ("llama", {"intermediate_size": 97}, Share(0, 2), "intermediate_size \\(97\\)"),
        ("llama", {}, Share(0, 2, 2), "expert_parallel_size is 2, but LlamaForCausalLM has no experts"),
        ("qwen3-moe", {"num_experts": 7}, Share(0, 2, 2), "expert_parallel_size 2 .* experts \\(7\\)"),
        ("qwen3-moe", {"moe_intermediate_size": 33}, Share(0, 2), "moe_intermediate_size \\(33\\)"),
    ],
)
def test_what_doesnt_divide(family: str, fields: dict[str, Any], share: Share, message: str) -> None:
    config = CONFIGS[family]()
    for name, value in fields.items():
        setattr(config, name, value)
    architecture = {"llama": "LlamaForCausalLM", "qwen3-moe": "Qwen3MoeForCausalLM"}[family]
    with pytest.raises(ConfigError, match=message):
        check_share(architecture, config, share)


def test_other_models_are_refused(tmp_path: Path) -> None:
    settings = ModelSettings(path=build("gpt-oss", tmp_path))
    with pytest.raises(UnsupportedModel, match="GptOssForCausalLM isn't served on several ranks"):
        check_cut(settings, load_config(settings), Share(0, 2))


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    twin = rewrite(tmp_path, gptq(4, 32, zero=True), {"quantization_config": config})
    settings = ModelSettings(path=twin.quantized)
    with pytest.raises(UnsupportedModel, match="is quantized: only plain safetensors are cut"):
        check_cut(settings, load_config(settings), Share(0, 2))


def test_groups_of_shared_scales_must_not_lie_on_two_ranks(tmp_path: Path) -> None:
    def refuse_or_not(**fields: Any) -> None:
        path = build("llama", tmp_path / "model", intermediate_size=fields.pop("intermediate_size", 128))
        settings = ModelSettings(path=path, **fields)
        check_cut(settings, load_config(settings), Share(0, 2))

    refuse_or_not(quantize="int4")
    refuse_or_not(quantize="int8", quantize_group_size=32)
    with pytest.raises(ConfigError, match=r"attention's output \(64\) within groups of 64 .* divides 32, or"):
        refuse_or_not(quantize="int8")
    with pytest.raises(ConfigError, match=r"intermediate_size \(96\) within groups of 32 inputs"):
        refuse_or_not(quantize="int4", intermediate_size=96)
