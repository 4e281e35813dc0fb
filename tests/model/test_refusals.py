"""Checkpoints that would be served as wrong text: refused by name, or served right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import (
    BartConfig,
    Data2VecTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    PreTrainedConfig,
    RobertaConfig,
    WhisperConfig,
)

from stemma.config.settings import ModelSettings
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import ModelError, UnsupportedModel
from stemma.model.files.tiny import save_checkpoint
from stemma.model.foreign.attention import use_paged_attention
from stemma.model.foreign.probe import probe
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM
from stemma.model.opened.checkpoint_config import context_limit
from tests import checkpoints
from tests.model.edited_checkpoints import Weights, configure, edit, fp8_checkpoint
from tests.model.paging import PagedSequences, plain_logits


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.build("qwen2", tmp_path_factory.mktemp("m") / "qwen2")


@pytest.fixture
def copy(qwen2: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(qwen2, tmp_path / "copy"))


def load(path: Path, **settings: Any) -> CausalLM:
    return load_model(ModelSettings(**{"path": path, "device": "cpu", **settings}))


UP = "model.layers.1.mlp.up_proj.weight"


def quantize(weights: Weights, scale_name: str, dtype: torch.dtype) -> None:
    scale = weights[UP].abs().max() / 100
    weights[UP] = (weights[UP] / scale).to(dtype)
    weights[UP.removesuffix("weight") + scale_name] = scale.reshape(1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("scale_name", ["weight_scale", "weight_scale_inv", "scales"])
def test_quantized_weights_without_a_quantizer(copy: Path, scale_name: str, dtype: torch.dtype) -> None:
    edit(copy, lambda weights: quantize(weights, scale_name, dtype))
    with pytest.raises(ModelError, match=r"quantized weights.*up_proj.*no quantization_config"):
        load(copy)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, torch.int64])
def test_integers_without_scales(copy: Path, dtype: torch.dtype) -> None:
    edit(copy, lambda weights: weights.update({UP: weights[UP].to(dtype)}))
    with pytest.raises(ModelError, match="quantized weights"):
        load(copy)


@pytest.mark.parametrize("method", ["modelopt", "something-new", None, 7])
def test_unknown_quantization(copy: Path, method: object) -> None:
    """transformers would skip it with a warning."""
    configure(copy, quantization_config={"quant_method": method})
    with pytest.raises(ModelError, match=rf"{method}.*unquantized"):
        load(copy)


def test_quantization_without_its_package(copy: Path) -> None:
    configure(copy, quantization_config={"quant_method": "hqq"})
    with pytest.raises(ModelError, match=r"hqq.*unquantized"):
        load(copy)


def test_biases_that_the_config_switches_off(tmp_path: Path) -> None:
    path = checkpoints.build("llama", tmp_path, attention_bias=True)
    configure(path, attention_bias=False)
    with pytest.raises(ModelError, match="attention_bias"):
        load(path)


def test_fewer_layers_than_the_file(copy: Path) -> None:
    configure(copy, num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(ModelError, match=r"layer 1.*num_hidden_layers is 1"):
        load(copy)


def test_layers_for_multi_token_prediction_are_no_surplus(tmp_path: Path) -> None:
    path = checkpoints.build("deepseek-v3", tmp_path)
    edit(path, lambda weights: weights.update({"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}))
    with pytest.raises(ModelError, match="layer 3"):
        load(path)
    configure(path, num_nextn_predict_layers=1)
    assert load(path).layout(8).num_layers == 3


def test_weights_of_nobody(copy: Path) -> None:
    edit(copy, lambda weights: weights.update({"model.layers.0.self_attn.gate.weight": torch.zeros(4, 4)}))
    with pytest.raises(ModelError, match=r"no place for.*self_attn\.gate"):
        load(copy)


def test_adapters(copy: Path, tmp_path: Path) -> None:
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter beside a full model.*--lora NAME="):
        load(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"adapter \(LoRA\) alone"):
        load(copy)


def test_other_formats(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"\.bin.*save_pretrained"):
        load(copy)
    (copy / "pytorch_model.bin").rename(copy / "model.gguf")
    with pytest.raises(ModelError, match="GGUF"):
        load(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match="GGUF"):
        load(copy)
    with pytest.raises(ModelError, match="doesn't begin with GGUF"):
        load(copy / "model.gguf")


def test_other_shapes(copy: Path) -> None:
    configure(copy, intermediate_size=64)
    with pytest.raises(ModelError, match=r"other shapes.*\[64, 96\].*\[64, 64\]") as refused:
        load(copy)
    assert "ignore_mismatched_sizes" not in str(refused.value)


def filled(name: str, value: float, row: int | None = None) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return an edit that fills a weight, or one row of it."""

    def fill(weights: dict[str, torch.Tensor]) -> None:
        (weights[name] if row is None else weights[name][row]).fill_(value)

    return fill


def test_weights_that_are_not_numbers(copy: Path) -> None:
    edit(copy, filled("model.embed_tokens.weight", float("nan"), row=300))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight has 64 values that are NaN"):
        load(copy)
    edit(copy, filled("model.embed_tokens.weight", float("inf"), row=300))
    with pytest.raises(ModelError, match="NaN or infinite"):
        load(copy)


def test_logits_that_are_not_numbers(copy: Path) -> None:
    """Every weight is finite, their products aren't."""
    edit(copy, filled("model.norm.weight", 3e38))
    with pytest.raises(ModelError, match="computes logits that are NaN"):
        load(copy)


SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 1,
    "is_decoder": True,
}


def _bart() -> PreTrainedConfig:
    return BartConfig(
        vocab_size=512,
        d_model=64,
        decoder_layers=2,
        encoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=96,
        max_position_embeddings=128,
    )


def _whisper() -> PreTrainedConfig:
    return WhisperConfig(
        vocab_size=512,
        d_model=64,
        decoder_layers=2,
        encoder_layers=1,
        decoder_attention_heads=4,
        encoder_attention_heads=4,
        decoder_ffn_dim=96,
        encoder_ffn_dim=96,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _gemma3(bidirectional: bool) -> PreTrainedConfig:
    return Gemma3TextConfig(
        **{key: value for key, value in SMALL.items() if key != "is_decoder"},
        num_key_value_heads=2,
        head_dim=16,
        use_bidirectional_attention=bidirectional,
        max_position_embeddings=256,
    )


REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "counts positions: bart": (_bart, "encoder-decoder"),
    "counts positions: roberta": (lambda: RobertaConfig(**SMALL), "positions"),
    "counts positions: data2vec": (lambda: Data2VecTextConfig(**SMALL), "positions"),
    "cross-attends: whisper": (_whisper, "WhisperForCausalLM.*encoder-decoder"),
    "looks ahead: gemma3": (lambda: _gemma3(True), "isn't causal"),
    "looks ahead: bert": (lambda: RobertaConfig(**{**SMALL, "is_decoder": False}), "isn't causal|positions"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_that_would_answer_wrongly(tmp_path: Path, case: str, dtype: str) -> None:
    make_config, message = REFUSED[case]
    model = checkpoints.make_model(make_config(), 0)
    path = save_checkpoint(model, checkpoints.tokenizer(), tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        load(path, dtype=dtype, max_model_len=100)


def test_positions_counted_by_the_model_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bart's decoder, were it let in: its second chunk begins at position 0 again."""
    monkeypatch.setattr(BartConfig, "is_encoder_decoder", False)
    path = save_checkpoint(checkpoints.make_model(_bart(), 0), checkpoints.tokenizer(), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"second chunk.*positions"):
        load(path)


def test_context_beyond_a_table_of_positions() -> None:
    """It would fail on the first long prompt; the probe asks for the last position."""
    model = checkpoints.make_model(GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64), 0)
    use_paged_attention(model)
    assert probe(model, last_position=63)[0].num_layers == 2
    with pytest.raises(ModelError, match="has no position 64; set a smaller max_model_len"):
        probe(model, last_position=64)


def test_the_same_family_that_looks_back_only(tmp_path: Path) -> None:
    path = save_checkpoint(checkpoints.make_model(_gemma3(False), 0), checkpoints.tokenizer(), tmp_path)
    assert load(path).info.architecture == "Gemma3ForCausalLM"


REMOTE = """
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

{setup}

class OwnModel(LlamaModel):
    def forward(self, *args, **kwargs):
        {body}
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state.flip(-1)
        return output

class Own(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
"""


def remote(tmp_path: Path, *, setup: str = "", body: str = "pass") -> Path:
    path = checkpoints.build("llama", tmp_path / "remote")
    (path / "own.py").write_text(REMOTE.format(setup=setup, body=body))
    configure(path, architectures=["Own"], auto_map={"AutoModelForCausalLM": "own.Own"})
    return path


def test_own_forward_around_llama_layers_runs(tmp_path: Path) -> None:
    """The layers are Llama's, what stands around them is not: it must not be skipped."""
    path = remote(tmp_path)
    model = load(path, trust_remote_code=True)
    tokens = list(range(5, 25))
    sequences = PagedSequences(model, [tokens])
    sequences.step([(0, 11)])
    sequences.step([(0, 9)])
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float32)
    with torch.inference_mode():
        expected = plain(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(sequences.logits[0], expected, atol=1e-4, rtol=1e-4)
    assert (expected - plain_logits(path, tokens)).abs().max() > 0.1  # plain Llama answers otherwise


@pytest.mark.parametrize("where", ["setup", "body"])
def test_remote_code_that_raises(tmp_path: Path, where: str) -> None:
    path = remote(tmp_path, **{where: "raise RuntimeError('out of order')"})
    with pytest.raises(ModelError, match="RuntimeError: out of order"):
        load(path, trust_remote_code=True)


def test_remote_code_with_an_index_without_metadata(tmp_path: Path) -> None:
    path = remote(tmp_path)
    (path / "model.safetensors").rename(path / "part.safetensors")
    weight_map = {"lm_head.weight": "part.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r'index\.json has no "metadata"; add "metadata": {}'):
        load(path, trust_remote_code=True)


@pytest.mark.parametrize("block", [(16, 32), (12, 20), (128, 128), None])
def test_fp8_in_blocks_of_any_size(tmp_path: Path, block: tuple[int, int] | None) -> None:
    """The last blocks of most weights are cut off: DeepSeek-V3's kv_a has 576 rows in blocks of 128."""
    path = fp8_checkpoint(tmp_path, block)
    model = load(path / "fp8", dtype="float32")
    tokens = list(range(40, 70))
    sequences = PagedSequences(model, [tokens])
    sequences.step([(0, 13)])
    sequences.step([(0, 17)])
    torch.testing.assert_close(
        sequences.logits[0], plain_logits(path / "plain", tokens), atol=1e-4, rtol=1e-4
    )


def test_fp8_whose_scales_dont_fit(tmp_path: Path) -> None:
    path = fp8_checkpoint(tmp_path, (16, 32)) / "fp8"
    configure(path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ModelError, match=r"blocks of 128 x 128.*weight_block_size"):
        load(path)
    configure(path, quantization_config={"quant_method": "fp8", "weight_block_size": "128"})
    with pytest.raises(ModelError, match="weight_block_size is '128'"):
        load(path)
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    edit(path, lambda weights: weights.__delitem__(name))
    configure(path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 32]})
    with pytest.raises(ModelError, match=r"o_proj.*scales.*missing"):
        load(path)


WRONG_FIELDS: tuple[dict[str, object], ...] = (
    {"hidden_size": "64"},
    {"num_attention_heads": 0},
    {"num_hidden_layers": -1},
    {"num_hidden_layers": []},
    {"rope_parameters": {"rope_type": "no-such-type", "rope_theta": 1e4}},
    {"rope_parameters": 5},
    {"hidden_act": "no-such-function"},
    {"dtype": "float7"},
    {"max_position_embeddings": 0},
    {"max_position_embeddings": "many"},
    {"architectures": "Qwen2ForCausalLM"},
    {"architectures": [7]},
    {"vocab_size": -3},
    {"layer_types": "full"},
    {"auto_map": 3},
    {"quantization_config": 4},
    {"model_type": ["qwen2"]},
)


@pytest.mark.parametrize("fields", WRONG_FIELDS, ids=lambda fields: f"{next(iter(fields.items()))}")
def test_wrong_fields(copy: Path, fields: dict[str, Any]) -> None:
    """Whatever a config.json says, it loads or one typed error comes out."""
    configure(copy, **fields)
    with pytest.raises(ModelError):
        load(copy)


@pytest.mark.parametrize("eos", ["2", [2, "3"], True, -1, {"a": 1}, 2.5])
def test_end_of_sequence_that_is_no_token(copy: Path, eos: object) -> None:
    configure(copy, "generation_config.json", eos_token_id=eos)
    with pytest.raises(ModelError, match="eos_token_id"):
        load(copy)


def test_generation_config_that_no_request_could_have(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server starts, says what it leaves out, and a request without these fields is fine."""
    fields = {"top_p": 1.5, "top_k": "20", "temperature": -1, "min_p": [0.1], "repetition_penalty": 1.1}
    configure(copy, "generation_config.json", do_sample=True, **fields)
    defaults = load(copy).default_sampling
    assert defaults == {"repetition_penalty": 1.1}
    SamplingParams(**cast(dict[str, Any], dict(defaults)))
    for name in ("top_p", "top_k", "temperature", "min_p"):
        assert any(name in record.getMessage() for record in caplog.records)
    (copy / "generation_config.json").write_text("[1]")
    with pytest.raises(ModelError, match="isn't a JSON object"):
        load(copy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtype_of_the_file_where_the_config_names_none(tmp_path: Path, dtype: torch.dtype) -> None:
    path = checkpoints.build("llama", tmp_path, dtype=dtype)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "dtype" not in k}))
    assert load(path).dtype == dtype


def test_rotary_embeddings_by_layer_type(tmp_path: Path) -> None:
    """The context ends where any of them turns its keys anew."""
    path = checkpoints.build("qwen2", tmp_path)
    plain = {"rope_type": "default", "rope_theta": 1e4}
    turning = {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }

    types = {"full_attention": turning, "sliding_attention": plain}
    assert context_limit(SimpleNamespace(max_position_embeddings=2048, rope_parameters=types)) == 32
    assert context_limit(SimpleNamespace(max_position_embeddings=2048, rope_parameters=plain)) == 2048
    assert load(path).max_model_len == 2048
