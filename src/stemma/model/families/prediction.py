"""Layers for multi-token prediction (MTP), which lie beside a model's own in its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

NUMBERED_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_PREDICTION = re.compile(r"(?:^|\.)mtp(?:\.|_)")


def is_prediction(name: str, config: Any) -> bool:
    """Whether a tensor belongs to layers for multi-token prediction, which `config` counts apart."""
    num_predicting = max(
        int(getattr(config, field, None) or 0) for field in ("num_nextn_predict_layers", "num_mtp_layers")
    )
    layer = NUMBERED_LAYER.search(name)
    if num_predicting and _PREDICTION.search(name):
        return True
    beyond = int(layer[1]) - int(config.num_hidden_layers) if layer else -1
    return 0 <= beyond < num_predicting


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """How a family's checkpoints name their layer for multi-token prediction, and how it is built alone."""

    prefix: Callable[[Any], str]
    """Takes a config; returns what the names of the layer's tensors begin with."""
    num_layers: Callable[[Any], int]
    """Takes a config; returns how many such layers it counts."""
    counted_as: str
    """The field that counts them."""
    embedding_norm: str
    hidden_norm: str
    joining: str
    """Projects a normed embedding beside a normed hidden state."""
    final_norm: str
    block: str
    """What the names of its decoder layer's tensors begin with, behind `prefix`."""
    make_alone: Callable[[Any, bool], None]
    """Changes a config so that it makes this decoder layer alone, with experts or without."""

    @property
    def beside(self) -> tuple[str, ...]:
        """The tensors that the layer has beside its decoder layer."""
        return self.embedding_norm, self.hidden_norm, self.joining, self.final_norm


def _deepseek_alone(config: Any, has_experts: bool) -> None:
    config.first_k_dense_replace = int(not has_experts)


def _qwen_next_alone(config: Any, has_experts: bool) -> None:
    config.layer_types = ["full_attention"]
    config.mlp_only_layers, config.decoder_sparse_step = ([] if has_experts else [0]), 1


DEEPSEEK_PREDICTION = PredictionNames(
    prefix=lambda config: f"model.layers.{int(config.num_hidden_layers)}.",
    num_layers=lambda config: int(getattr(config, "num_nextn_predict_layers", None) or 0),
    counted_as="num_nextn_predict_layers",
    embedding_norm="enorm.weight",
    hidden_norm="hnorm.weight",
    joining="eh_proj.weight",
    final_norm="shared_head.norm.weight",
    block="",
    make_alone=_deepseek_alone,
)
QWEN_NEXT_PREDICTION = PredictionNames(
    prefix=lambda _config: "mtp.",
    num_layers=lambda config: int(getattr(config, "num_nextn_predict_layers", None) or 1),
    counted_as="num_nextn_predict_layers",
    embedding_norm="pre_fc_norm_embedding.weight",
    hidden_norm="pre_fc_norm_hidden.weight",
    joining="fc.weight",
    final_norm="norm.weight",
    block="layers.0.",
    make_alone=_qwen_next_alone,
)
"""Published configs count no such layer; the tensors say that there is one."""
QWEN_3_5_PREDICTION = replace(
    QWEN_NEXT_PREDICTION,
    num_layers=lambda config: int(getattr(config, "mtp_num_hidden_layers", 1)),
    counted_as="mtp_num_hidden_layers",
)
