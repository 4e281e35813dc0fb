"""Arguments of attention in each layer of a model of transformers, found by running two tokens through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stemma.errors import ModelError, UnsupportedModel
from stemma.memory.device.layout import StateLayout, WindowGroup
from stemma.model.attend.attention import SUPPORTED, AttentionCall
from stemma.model.attend.compression import compressed_layout
from stemma.model.attend.kept_kv import KVShape
from stemma.model.attend.recurrence import TorchRecurrence
from stemma.model.foreign.attention import POSITIONS_KEYWORD, STEP_KEYWORD, AttentionProbe
from stemma.model.foreign.recurrence import ProbedStates, cache_of, divert, running

_LEAST_DIM = 16


def probe(
    hf_model: Any, *, last_position: int = 1, after_layer: Callable[[], None] | None = None
) -> tuple[KVShape, list[AttentionCall]]:
    """Return the shape of the KV that the layers of a model keep, and their attention calls.

    Two tokens run through the model, at positions 0 and `last_position`; `after_layer` is called in each
    layer. Raises UnsupportedModel if a layer bypasses attention, keeps other state, or differs from the
    others; ModelError without that position.
    """
    config = hf_model.config.get_text_config()
    recorder, states = _run_probe(hf_model, last_position, after_layer)
    calls = {call.layer_idx: (call, heads, dim, value) for call, heads, dim, value in recorder.calls}
    state = None if states is None else states.layout()
    without_kv = _without_kv(config, set() if state is None else {part.layer for part in state.parts})
    if len(recorder.calls) != len(calls) or calls.keys() != set(range(config.num_hidden_layers)) - without_kv:
        raise UnsupportedModel(
            f"{type(hf_model).__name__}: {len(calls)} of {config.num_hidden_layers} layers go through "
            f"attention. {SUPPORTED}"
        )
    if not calls:
        # A block holds nothing then; it stands for its tokens.
        return KVShape(1, 1, 1, _LEAST_DIM, state=state), []
    _number_layers(hf_model, sorted(calls))
    ordered = [calls[index][0] for index in sorted(calls)]
    shapes = [(calls[index][1], max(calls[index][2:])) for index in sorted(calls)]
    return _shape(hf_model, ordered, shapes, state, last_position), ordered


def _run_probe(
    hf_model: Any, last_position: int, after_layer: Callable[[], None] | None
) -> tuple[AttentionProbe, ProbedStates | None]:
    """Run two tokens through a model; return what its layers told of their attention and states."""
    name = type(hf_model).__name__
    recorder = AttentionProbe(after_layer)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=hf_model.device)
    states = ProbedStates(TorchRecurrence(), 2) if divert(hf_model) else None
    options = {} if states is None else cache_of(hf_model)
    with torch.inference_mode(), running(states):
        try:
            positions = torch.tensor([0, last_position], device=hf_model.device)
            hf_model(
                input_ids=tokens,
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=torch.tensor([1], device=hf_model.device),
                **{STEP_KEYWORD: recorder, POSITIONS_KEYWORD: positions, **options},
            )
        except TypeError as error:
            raise UnsupportedModel(f"{name} doesn't take our keywords: {error}. {SUPPORTED}") from error
        except IndexError as error:
            raise ModelError(
                f"{name} has no position {last_position}; set a smaller max_model_len"
            ) from error
    return recorder, states


def _shape(
    hf_model: Any,
    ordered: Sequence[AttentionCall],
    shapes: Sequence[tuple[int, int]],
    state: StateLayout | None,
    last_position: int,
) -> KVShape:
    """Return what layers with these calls and `shapes` (heads, dimension) keep. Raises UnsupportedModel."""
    config, name = hf_model.config.get_text_config(), type(hf_model).__name__
    _check_windows(name, config, {call.layer_idx: call.sliding_window for call in ordered})
    if ordered[0].compression is not None:
        compressed, group = compressed_layout(config, last_position + 1)
        return KVShape(2, 1, 1, group.head_dim, windows=group, compressed=compressed)
    windows = None  # latents always lie in blocks
    if ordered[0].latent is None:
        windows = WindowGroup.of([(call.sliding_window, call.chunk) for call in ordered], shapes)
    in_pages = () if windows is None else windows.layers
    in_blocks = {shape for number, shape in enumerate(shapes) if number not in in_pages}
    apart = {shape for number, shape in enumerate(shapes) if number in in_pages}
    has_value = {call.latent is None for call in ordered}
    if len(in_blocks) != 1 or len(apart) > 1 or len(has_value) != 1:
        raise UnsupportedModel(f"{name}: layers keep KV of different shapes. {SUPPORTED}")
    (heads, dim), latent = in_blocks.pop(), ordered[0].latent
    rank = 0 if latent is None else latent.rank
    num_parts = 2 if latent is None else 1
    index_dim = 0 if ordered[0].selection is None else ordered[0].selection.dim
    return KVShape(len(ordered), num_parts, heads, dim, rank, state, windows, index_dim)


def _without_kv(config: Any, with_state: set[int]) -> set[int]:
    """Return the layers that need no attention: those that keep a state, or have only a feed-forward part."""
    types = getattr(config, "layer_types", None) or []
    return {
        number
        for number in range(config.num_hidden_layers)
        if (
            number in with_state
            and (number >= len(types) or not types[number].startswith(("full", "hybrid")))
        )
        or (number < len(types) and types[number] in ("moe", "mlp"))
    }


def _number_layers(hf_model: Any, with_attention: list[int]) -> None:
    """Have layers with attention count their KV without the others."""
    numbers = {layer: number for number, layer in enumerate(with_attention)}
    modules: Any = hf_model.modules()
    for module in modules:
        if getattr(module, "layer_idx", None) in numbers:
            module.stemma_layer = numbers[module.layer_idx]


def _check_windows(name: str, config: Any, passed: dict[int, int | None]) -> None:
    """Refuse a model that applies its sliding window by a mask that isn't passed to us."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    for index, seen in passed.items():
        slides = layer_types[index] == "sliding_attention" if layer_types else window is not None
        if slides and seen is None:
            raise UnsupportedModel(f"{name}: layer {index} hides its sliding window. {SUPPORTED}")
