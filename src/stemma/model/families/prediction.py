"""Layers for multi-token prediction (MTP), which lie beside a model's own in its checkpoint."""

from __future__ import annotations

import re
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
