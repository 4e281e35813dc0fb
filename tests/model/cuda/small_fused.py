"""Small models with a layout's fused decoder, for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.model.cuda.row_attention import RowReader

from stemma.config.settings import ModelSettings
from stemma.memory.device.kv import DeviceKV
from stemma.model.attend.batch import ForwardBatch
from stemma.model.cpu.heads import kv_shape_of
from stemma.model.cuda.fused import LayoutDecoder
from stemma.model.cuda.layers import LayerStep
from stemma.model.cuda.state_list import StateList, list_states
from stemma.model.load.fused_loading import fitting_layout, named_weights
from stemma.model.opened.causal_lm import CausalLM, ModelInfo
from stemma.model.opened.checkpoint import open_checkpoint
from stemma.model.opened.checkpoint_config import describe_checkpoint

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""The interpreter takes a few milliseconds for each head of each token."""


class RowSteps:
    """A `Decoder` whose attention is one row at a time, in torch, which is quicker than the interpreter."""

    def __init__(self, decoder: LayoutDecoder) -> None:
        self._decoder = decoder

    def adaptable(self) -> dict[str, Any]:
        return {}

    def prepare_adapter(self, adapter: object) -> object:
        raise AssertionError(adapter)

    def forward(self, batch: ForwardBatch, kv: DeviceKV) -> torch.Tensor:
        num_rows = len(batch.token_ids)
        listed = StateList(torch.from_numpy(list_states(batch, num_rows, kv)), 0, num_rows)
        states = self._decoder.states(batch, LayerStep(RowReader(batch, kv), kv, states=listed))
        return self._decoder.head(states.index_select(0, batch.logits_rows))


def fused(
    path: Path, dtype: torch.dtype = torch.float32, steps: Callable[[LayoutDecoder], Any] = RowSteps
) -> CausalLM:
    """The model of `path` with the fused decoder."""
    settings = ModelSettings.model_validate({"path": path, "dtype": str(dtype).removeprefix("torch.")})
    described = describe_checkpoint(settings)
    checkpoint = open_checkpoint(settings, described.config, described.vision)
    layout = fitting_layout(checkpoint)
    assert layout is not None
    decoder = LayoutDecoder(layout, named_weights(checkpoint), dtype, CPU, max_positions=64)
    info = ModelInfo("", layout.embedding.outputs, 64, (), {}, "", 0)
    return CausalLM(steps(decoder), info, kv_shape_of(layout), CPU, dtype)


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "smollm3": {},
    "gemma3": {"sliding_window": 2},
    "qwen3-moe": {"num_hidden_layers": 1},
    "gpt-oss": {"sliding_window": 2},
    "deepseek-v2": {"num_key_value_heads": 2, "kv_lora_rank": 32, "mlp_bias": True},
    "deepseek-v3": {"num_key_value_heads": 2, "num_hidden_layers": 2},
}
"""What each adds: biases and a tied head, norms of heads, layers that don't rotate, four norms and windows,
experts, sinks, latents in two ways."""
