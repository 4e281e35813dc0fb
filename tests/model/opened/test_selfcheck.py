"""The self-check runs only as many layers of a large model as show each kind of them, and finds the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.checkpoints import make_model, save_checkpoint, tokenizer
from tests.model.paging import PagedSequences
from transformers import Olmo2Config, Olmo3Config, PreTrainedConfig, Qwen3MoeConfig

from stemma.config.settings import ModelSettings
from stemma.errors import UnsupportedModel
from stemma.model.foreign import reference
from stemma.model.load.loading import load_model
from stemma.model.opened.causal_lm import CausalLM

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def olmo3(num_layers: int = 8) -> PreTrainedConfig:
    """Every fourth layer sees all tokens, the others a window."""
    types = ["full_attention" if n % 4 == 3 else "sliding_attention" for n in range(num_layers)]
    return Olmo3Config(**SIZES, num_hidden_layers=num_layers, layer_types=types, sliding_window=5)


def served(model: CausalLM, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the logits [T, vocab] of a prompt that is served in chunks."""
    sequences = PagedSequences(model, [tokens.tolist()])
    sequences.finish(chunk)
    return sequences.logits[0]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "LARGE_BYTES", 0)


def test_the_first_layers_have_every_kind(large: None) -> None:
    model = make_model(olmo3(), 0)
    first = reference.FirstLayers.of(model)
    assert first.count == 4
    with first.alone():
        assert (len(model.model.layers), model.config.num_hidden_layers) == (4, 4)
    assert (len(model.model.layers), model.config.num_hidden_layers) == (8, 8)
    alike = make_model(Olmo2Config(**{**SIZES, "num_hidden_layers": 6}), 0)
    assert reference.FirstLayers.of(alike).count == 2


def test_small_models_and_tested_classes_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference.FirstLayers.of(make_model(olmo3(), 0)).count == 8
    monkeypatch.setattr(reference, "LARGE_BYTES", 0)
    mixture = Qwen3MoeConfig(
        **SIZES, num_hidden_layers=3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    assert reference.FirstLayers.of(make_model(mixture, 0)).count == 3


def test_a_large_model_is_checked_and_then_runs_whole(tmp_path: Path, large: None) -> None:
    plain = make_model(olmo3(), 0)
    path = save_checkpoint(plain, tokenizer(), tmp_path)
    model = load_model(ModelSettings(path=path, dtype="float32"))
    tokens = torch.arange(5, 40) % model.vocab_size
    expected = plain.float()(input_ids=tokens[None], use_cache=False).logits[0].detach()
    torch.testing.assert_close(served(model, tokens, chunk=20), expected, atol=1e-3, rtol=1e-3)


def test_a_model_that_packing_makes_small_is_still_checked_by_its_first_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed weights leave the model: the reference ran on two layers, and all were compared with it."""
    plain = make_model(Olmo2Config(**{**SIZES, "num_hidden_layers": 6}), 0)
    layer_bytes = sum(weight.nbytes for weight in plain.model.layers.parameters())
    path = save_checkpoint(plain, tokenizer(), tmp_path)
    monkeypatch.setattr(reference, "LARGE_BYTES", layer_bytes - 1)
    model = load_model(ModelSettings(path=path, dtype="float32"))
    tokens = torch.arange(5, 25) % model.vocab_size
    expected = plain.float()(input_ids=tokens[None], use_cache=False).logits[0].detach()
    torch.testing.assert_close(served(model, tokens, chunk=20), expected, atol=1e-3, rtol=1e-3)


def test_a_layer_that_is_served_wrongly_is_found_in_a_large_model(
    tmp_path: Path, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.olmo3.modeling_olmo3 import Olmo3Attention

    path = save_checkpoint(make_model(olmo3(), 0), tokenizer(), tmp_path)
    forward = Olmo3Attention.forward

    def scaled(self, hidden_states, *arguments, **keywords):
        """Of full layers alone, and only where attention is ours."""
        output, weights = forward(self, hidden_states, *arguments, **keywords)
        is_wrong = self.layer_idx == 3 and "stemma" in self.config._attn_implementation
        return (output * -3.0 if is_wrong else output), weights

    monkeypatch.setattr(Olmo3Attention, "forward", scaled)
    with pytest.raises(UnsupportedModel, match="other logits"):
        load_model(ModelSettings(path=path, dtype="float32"))
