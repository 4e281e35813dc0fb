"""A model that runs through modules computes the same bits however a prompt is cut, or it is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import hybrids
from tests.checkpoints import make_model, tokenizer
from tests.model.paging import PagedSequences, plain_logits
from transformers import GPT2Config, Olmo3Config, ZayaConfig

from stemma.config.settings import ModelSettings
from stemma.errors import UnsupportedModel
from stemma.model.files.tiny import save_checkpoint
from stemma.model.load.loading import load_model
from stemma.model.opened import selfcheck
from stemma.model.opened.same_bits import RowCounting

PROMPT = [3 + 7 * number % 500 for number in range(200)]
SIZES: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 256, "pad_token_id": 0},
}


def test_queries_of_llama_4_grow_by_position(tmp_path: Path) -> None:
    """In transformers they grow by the row of a step, which is the position in a lone first chunk alone."""
    path = hybrids.build("llama4_text", tmp_path, floor_scale=64)
    model = load_model(ModelSettings(path=path, device="cpu", dtype="float32"))
    expected = plain_logits(path, PROMPT)
    run = PagedSequences(model, [PROMPT[::-1], PROMPT])
    run.step([(0, 50)])
    run.step([(0, 90), (1, 70)])
    run.finish(chunk=33)
    torch.testing.assert_close(run.logits[1], expected, atol=1e-4, rtol=1e-4)
    alone = PagedSequences(model, [PROMPT])
    alone.step([(0, 200)])
    assert torch.equal(alone.logits[0], run.logits[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_lost_state_is_found_whatever_the_dtype_rounds(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if rounding could explain the difference from transformers."""
    monkeypatch.setattr(selfcheck, "LIMITS", dict.fromkeys(selfcheck.LIMITS, 9.0))
    config = ZayaConfig(**SIZES, num_hidden_layers=2, num_experts=4, moe_intermediate_size=32)
    path = save_checkpoint(make_model(config, 0), tokenizer(), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"ZayaForCausalLM.*in two chunks.*other logits"):
        load_model(ModelSettings.model_validate({"path": path, "device": "cpu", "dtype": dtype}))


def test_a_layer_that_counts_rows_is_refused_though_its_logits_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.olmo3.modeling_olmo3 import Olmo3Attention

    path = save_checkpoint(make_model(Olmo3Config(**SIZES, num_hidden_layers=2), 0), tokenizer(), tmp_path)
    forward = Olmo3Attention.forward

    def counting(self: Any, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        rows = torch.arange(hidden_states.shape[1])
        factor = torch.log1p(torch.floor((rows.float() + 1.0) / 8192)) + 1.0
        return forward(self, hidden_states * factor[:, None].to(hidden_states.dtype), *arguments, **keywords)

    monkeypatch.setattr(Olmo3Attention, "forward", counting)
    with pytest.raises(UnsupportedModel, match=r"Olmo3ForCausalLM.*float counts the rows of a step"):
        load_model(ModelSettings(path=path, device="cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_lie_by_columns_are_served(dtype: str, tmp_path: Path) -> None:
    """torch's products with them depend on the number of rows, in float32."""
    config = GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=256)
    path = save_checkpoint(make_model(config, 0), tokenizer(), tmp_path)
    model = load_model(ModelSettings.model_validate({"path": path, "device": "cpu", "dtype": dtype}))
    tokens = [token % 320 for token in PROMPT]
    whole, cut = PagedSequences(model, [tokens]), PagedSequences(model, [tokens])
    whole.step([(0, 200)])
    cut.step([(0, 130)])
    cut.finish(chunk=7)
    assert torch.equal(whole.logits[0], cut.logits[0])
    if dtype == "float32":
        torch.testing.assert_close(whole.logits[0], plain_logits(path, tokens), atol=1e-4, rtol=1e-4)


def test_numbers_of_rows_may_find_rows() -> None:
    values = torch.randn(5, 3)
    with RowCounting(5) as counted:
        rows = torch.arange(5)
        values[rows, rows % 3] += 1
        values.index_select(0, rows + 0)
        torch.where(rows[:, None] >= rows[None], 0.0, 1.0)
    assert counted.by is None
    with counted:
        torch.arange(5) * 0.5
    assert re.fullmatch("__r?mul__|mul", counted.by or "")
