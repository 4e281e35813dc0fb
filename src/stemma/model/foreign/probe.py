"""What each layer of a model of transformers hands to attention, found by running two tokens through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.attention import SUPPORTED, AttentionCall
from stemma.model.causal_lm import KVShape
from stemma.model.foreign.attention import STEP_KEYWORD, AttentionProbe


def probe(
    hf_model: Any, *, last_position: int = 1, after_layer: Callable[[], None] | None = None
) -> tuple[KVShape, list[AttentionCall]]:
    """Return the shape of the KV that the layers of a model keep, and their attention calls.

    Two tokens run through the model, at positions 0 and `last_position`; `after_layer` is called in each
    layer. Raises UnsupportedModel if a layer bypasses attention, keeps other state, or differs from the
    others; ModelError without that position.
    """
    config = hf_model.config.get_text_config()
    name = type(hf_model).__name__
    recorder = AttentionProbe(after_layer)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=hf_model.device)
    with torch.inference_mode():
        try:
            hf_model(
                input_ids=tokens,
                position_ids=torch.tensor([[0, last_position]], device=hf_model.device),
                use_cache=False,
                logits_to_keep=torch.tensor([1], device=hf_model.device),
                **{STEP_KEYWORD: recorder},
            )
        except TypeError as error:
            raise UnsupportedModel(f"{name} doesn't take our keywords: {error}. {SUPPORTED}") from error
        except IndexError as error:
            raise ModelError(
                f"{name} has no position {last_position}; set a smaller max_model_len"
            ) from error
    calls = {call.layer_idx: (call, heads, dim, value) for call, heads, dim, value in recorder.calls}
    num_layers = config.num_hidden_layers
    if len(recorder.calls) != num_layers or sorted(calls) != list(range(num_layers)):
        raise UnsupportedModel(
            f"{name}: {len(calls)} of {num_layers} layers go through attention. {SUPPORTED}"
        )
    ordered = [calls[index][0] for index in range(num_layers)]
    _check_windows(name, config, [call.sliding_window for call in ordered])
    shapes = {(heads, max(dim, value), call.latent is None) for call, heads, dim, value in calls.values()}
    if len(shapes) != 1:
        raise UnsupportedModel(f"{name}: layers keep KV of different shapes. {SUPPORTED}")
    heads, dim, has_value = shapes.pop()
    latent = ordered[0].latent
    rank = 0 if latent is None else latent.rank
    return KVShape(num_layers, 2 if has_value else 1, heads, dim, rank), ordered


def _check_windows(name: str, config: Any, passed: list[int | None]) -> None:
    """Refuse a model that applies its sliding window by a mask that isn't passed to us."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    for index, seen in enumerate(passed):
        slides = layer_types[index] == "sliding_attention" if layer_types else window is not None
        if slides and seen is None:
            raise UnsupportedModel(f"{name}: layer {index} hides its sliding window. {SUPPORTED}")
