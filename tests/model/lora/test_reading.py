"""Adapter directories: what is read from them, and that whatever else they hold ends in an AdapterError."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapters import write_adapter

from stemma.errors import AdapterError
from stemma.model.lora.adapter import Adapter, LinearShape
from stemma.model.lora.reading import read_adapter

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
LINEARS = {Q: LinearShape(8, 16), UP: LinearShape(24, 16)}


def matrices(rank: int = 4, seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    return {
        name: (torch.randn(rank, shape.in_features), torch.randn(shape.out_features, rank))
        for name, shape in LINEARS.items()
    }


def read(path: Path, **options: Any) -> Adapter:
    return read_adapter(path, LINEARS, **({"max_rank": 16} | options))


def refused(path: Path, *words: str, **options: Any) -> None:
    with pytest.raises(AdapterError) as caught:
        read(path, **options)
    for word in words:
        assert word in str(caught.value)


def test_read(tmp_path: Path) -> None:
    given = matrices()
    adapter = read(write_adapter(tmp_path, given, lora_alpha=6))
    assert adapter.rank == 4
    for name, (down, up) in given.items():
        pair = adapter.pairs[name]
        assert pair.down.equal(down)
        assert pair.up.equal(up)
        assert pair.scale == 6 / 4
    assert adapter.num_bytes == sum(4 * (down.numel() + up.numel()) for down, up in given.values())


def test_key_names_the_content(tmp_path: Path) -> None:
    """Matrices and factors, wherever they lie and whatever else their config says."""
    one = read(write_adapter(tmp_path / "a", matrices()))
    same = read(write_adapter(tmp_path / "b", matrices(), task_type="CAUSAL_LM", revision="x"))
    assert one.key == same.key
    others = [
        write_adapter(tmp_path / "c", matrices(seed=1)),
        write_adapter(tmp_path / "d", matrices(), lora_alpha=5),
        write_adapter(tmp_path / "e", matrices(), use_rslora=True),
        write_adapter(tmp_path / "f", {Q: matrices()[Q]}),
        write_adapter(tmp_path / "g", matrices(), alpha_pattern={"q_proj": 2}),
    ]
    assert len({one.key, *(read(path).key for path in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "PREFIX_TUNING"}, ["PREFIX_TUNING", "LORA"]),
        ({"use_dora": True}, ["DoRA"]),
        ({"bias": "all"}, ["bias"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save"]),
        ({"trainable_token_indices": [1]}, ["embeddings"]),
        ({"target_parameters": ["mlp.experts.down_proj"]}, ["experts"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({"alora_invocation_tokens": [1]}, ["alora_invocation_tokens"]),
        ({"some_new_way": {"x": 1}}, ["some_new_way"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["pissa", "base"]),
        ({"r": 8}, ["rank 4"]),
        ({"r": None}, ["r must be"]),
        ({"lora_alpha": float("nan")}, ["lora_alpha"]),
        ({"lora_alpha": "8"}, ["lora_alpha"]),
        ({"alpha_pattern": {".*": 8}}, ["alpha_pattern"]),
        ({"rank_pattern": [1]}, ["rank_pattern"]),
        ({"target_modules": ["k_proj"]}, ["target_modules", "belong together"]),
        ({"target_modules": ".*k_proj"}, ["target_modules"]),
        ({"target_modules": "(a"}, ["regular expression"]),
        ({"target_modules": None}, ["target_modules"]),
        ({"target_modules": "(((.*)*)*)*!"}, ["target_modules"]),
    ],
)
def test_configs(tmp_path: Path, fields: dict[str, Any], words: list[str]) -> None:
    refused(write_adapter(tmp_path, matrices(), **fields), *words)


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|up)_proj", ["q_proj", "mlp.up_proj"], [Q, UP]])
def test_targets(tmp_path: Path, targets: Any) -> None:
    assert set(read(write_adapter(tmp_path, matrices(), target_modules=targets)).pairs) == set(LINEARS)


@pytest.mark.parametrize(
    ("name", "down", "up", "words"),
    [
        ("lm_head", (4, 16), (24, 4), ["lm_head", "q_proj, up_proj"]),
        ("model.layers.0.mlp.experts", (4, 16), (24, 4), ["experts", "isn't served"]),
        ("model.layers.7.self_attn.q_proj", (4, 16), (8, 4), ["layers.7"]),
        (Q, (4, 17), (8, 4), ["another model"]),
        (Q, (4, 16), (9, 4), ["another model"]),
        (Q, (4, 16), (8, 5), ["another model"]),
        (Q, (17, 16), (8, 17), ["rank 17", "max_lora_rank"]),
        (Q, (16,), (8,), ["another model"]),
    ],
)
def test_shapes(
    tmp_path: Path, name: str, down: tuple[int, ...], up: tuple[int, ...], words: list[str]
) -> None:
    pair = torch.ones(down), torch.ones(up)
    refused(write_adapter(tmp_path, {name: pair}, r=down[0], target_modules=[name]), *words)


@pytest.mark.parametrize("tensor", [f"base_model.model.{Q}.lora_A.default.weight", f"{Q}.weight", "x" * 1000])
def test_unknown_tensors(tmp_path: Path, tensor: str) -> None:
    from safetensors.torch import save_file

    write_adapter(tmp_path, matrices())
    save_file({tensor: torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    refused(tmp_path, "isn't served")


def test_embeddings_and_dora_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write_adapter(tmp_path, matrices())
    for tensor, words in (
        ("base_model.model.lm_head.base_layer.weight", "adapts lm_head"),
        ("base_model.model.model.embed_tokens.base_layer.weight", "adapts embed_tokens"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings"),
        (f"base_model.model.{Q}.lora_magnitude_vector.weight", "DoRA"),
    ):
        save_file({tensor: torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
        refused(tmp_path, words)


def test_numbers(tmp_path: Path) -> None:
    broken = matrices()
    broken[Q][0][1, 1] = float("inf")
    refused(write_adapter(tmp_path, broken), "NaN or infinite")
    down, up = matrices()[Q]
    refused(write_adapter(tmp_path, {Q: (down.double(), up.double())}), "F64")


def break_nothing(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def break_no_half(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({f"base_model.model.{Q}.lora_A.weight": torch.ones(4, 16)}, path / "adapter_model.safetensors")


def break_empty(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({}, path / "adapter_model.safetensors")


def break_cut(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def break_header(path: Path) -> None:
    (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")


def break_pickle(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def break_fifo(path: Path) -> None:
    (path / "adapter_model.safetensors").unlink()
    os.mkfifo(path / "adapter_model.safetensors")


def break_loop(path: Path) -> None:
    (path / "adapter_config.json").unlink()
    (path / "adapter_config.json").symlink_to(path / "adapter_config.json")


def break_big_config(path: Path) -> None:
    (path / "adapter_config.json").write_text(json.dumps({"x": "y" * (1 << 21)}))


def break_deep_config(path: Path) -> None:
    (path / "adapter_config.json").write_text("[" * 100_000)


def break_list_config(path: Path) -> None:
    (path / "adapter_config.json").write_text("[]")


@pytest.mark.parametrize(
    "break_it",
    [
        *(break_nothing, break_no_half, break_empty, break_cut, break_header, break_pickle, break_fifo),
        *(break_loop, break_big_config, break_deep_config, break_list_config),
    ],
)
def test_broken_directories(tmp_path: Path, break_it: Callable[[Path], None]) -> None:
    write_adapter(tmp_path, matrices())
    break_it(tmp_path)
    refused(tmp_path)


def test_only_from_allowed_directories(tmp_path: Path) -> None:
    """Links are resolved: of the directory and of each file."""
    inside, outside = tmp_path / "allowed", tmp_path / "other"
    adapter = write_adapter(inside / "a", matrices())
    read(adapter, within=[inside])
    (inside / "b").mkdir()
    read(inside / "b" / ".." / "a", within=[inside])
    write_adapter(outside / "a", matrices())
    refused(outside / "a", "leads out", within=[inside])
    refused(inside / ".." / "other" / "a", "leads out", within=[inside])
    (inside / "link").symlink_to(outside / "a")
    refused(inside / "link", "leads out", within=[inside])
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.safetensors").symlink_to(outside / "a" / "adapter_model.safetensors")
    refused(adapter, "leads out", within=[inside])
    refused(adapter, within=[])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_end_in_an_adapter_or_its_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_adapter(tmp_path_factory.mktemp("adapter"), matrices())
    file = path / data.draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(raw), 600) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    file.write_bytes(raw)
    try:
        adapter = read(path)
    except AdapterError:
        return
    assert set(adapter.pairs) <= set(LINEARS)


@pytest.mark.parametrize("field", ["peft_type", "bias", "lora_alpha", "init_lora_weights"])
def test_a_long_value_is_shown_in_part(field: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", matrices(), **{field: "pissa" * 10_000})
    with pytest.raises(AdapterError) as refused:
        read(path)
    assert field in str(refused.value)
    assert len(str(refused.value)) < len(str(path)) + 400


def test_an_offset_without_end(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", matrices())
    header = b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, Infinity]}}'
    (path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(AdapterError, match="malformed header"):
        read(path)
