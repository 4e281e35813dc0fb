"""Results that a model of transformers computes by itself, for the self-check at load (selfcheck.py).

Architectures on `TESTED` are compared with transformers by our tests and skip the check. Of a large model
only the first layers run, enough to have each kind: the check reads weights three times, and an 8B model has
16 GB of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stemma.errors import UnsupportedModel
from stemma.foreign_code import ForeignCode
from stemma.model.attend.attention import SUPPORTED
from stemma.model.families.registry import TESTED
from stemma.model.opened.same_bits import median_error
from stemma.model.opened.selfcheck import CHUNKS, LIMITS, NUM_TOKENS, Reference, check_logits

LARGE_BYTES = 2 << 30
"""Weights of all layers together above which only some layers are checked."""


def needs_check(hf_model: Any) -> bool:
    """Whether a model's logits must be compared: all but plain models of the tested classes."""
    model_class = type(hf_model)
    is_known = model_class.__name__ in TESTED and model_class.__module__.startswith("transformers.models.")
    return not is_known or getattr(hf_model, "hf_quantizer", None) is not None


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The layers of a model that the check runs: all, or the first ones of a large model.

    Chosen once, of the model as it was read: packing takes weights out of it, and it looks small afterwards.
    """

    config: Any
    count: int
    """Layers that run."""
    parent: nn.Module | None = None
    """The module whose list of layers is made shorter; None: all layers run."""
    name: str = ""

    @classmethod
    def of(cls, hf_model: Any) -> FirstLayers:
        """Choose the fewest layers that have one of each kind, and at least two.

        A small model, one of a tested class (which has a fast path of its own) and one whose list of layers
        can't be told run whole.
        """
        config = hf_model.config.get_text_config()
        total = getattr(config, "num_hidden_layers", 0)
        lists = [
            (parent, name, layers)
            for parent in hf_model.modules()
            for name, layers in parent.named_children()
            if isinstance(layers, nn.ModuleList) and len(layers) == total
        ]
        is_large = sum(p.nbytes for _, _, layers in lists for p in layers.parameters()) > LARGE_BYTES
        if len(lists) != 1 or not is_large or type(hf_model).__name__ in TESTED:
            return cls(config, total)
        [(parent, name, layers)] = lists
        kinds = [_kind(config, number, layer) for number, layer in enumerate(layers)]
        count = next(n for n in range(1, total + 1) if set(kinds[:n]) == set(kinds))
        return cls(config, min(total, max(2, count)), parent, name)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the model run on these layers only."""
        if self.parent is None:
            yield
            return
        layers = getattr(self.parent, self.name)
        setattr(self.parent, self.name, nn.ModuleList(list(layers)[: self.count]))
        self.config.num_hidden_layers = self.count
        try:
            yield
        finally:
            setattr(self.parent, self.name, layers)
            self.config.num_hidden_layers = len(layers)


def _kind(config: Any, number: int, layer: nn.Module) -> tuple[object, ...]:
    """Return what tells kinds of layers apart: classes, shapes, and the type that the config names."""
    types = getattr(config, "layer_types", None)
    classes = tuple(type(module).__name__ for module in layer.modules())
    shapes = tuple(tuple(parameter.shape) for parameter in layer.parameters())
    return (None if types is None else types[number], classes, shapes)


@torch.inference_mode()
def take_reference(hf_model: Any) -> Reference:
    """Run the check's tokens through the unchanged model, as transformers does.

    Raises UnsupportedModel if it doesn't run on token ids alone, or if a token's logits depend on later ones.
    """
    name = type(hf_model).__name__
    vocab_size = int(hf_model.config.get_text_config().vocab_size)
    # Two prompts, equal in the first chunk: if logits differ there, the model looked ahead.
    tokens = _prompt(hf_model.config, vocab_size)
    other = torch.cat((tokens[: CHUNKS[0]], tokens[CHUNKS[0] :].flip(0)))
    both = torch.stack((tokens, other)).to(hf_model.device)
    with ForeignCode(f"{name} doesn't compute logits from token ids alone", f". {SUPPORTED}"):
        logits = hf_model(input_ids=both, use_cache=False).logits.float().cpu()
    if logits.shape != (2, NUM_TOKENS, vocab_size):
        raise UnsupportedModel(
            f"{name} returns logits {list(logits.shape)}, not one row of {vocab_size} a token. {SUPPORTED}"
        )
    check_logits(name, logits)
    ahead = median_error(logits[1, : CHUNKS[0]], logits[0, : CHUNKS[0]])
    if ahead > LIMITS.get(hf_model.dtype, 1e-3):
        raise UnsupportedModel(
            f"{name} isn't causal: the logits of a token change with the tokens after it, so nothing of "
            f"it can be cached. {SUPPORTED}"
        )
    return Reference(tokens, logits[0])


def _prompt(config: Any, vocab_size: int) -> torch.Tensor:
    """Return token ids from the whole vocabulary, without special ones that some models treat differently."""
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    ids = [number * 7919 % vocab_size for number in range(1, 20 * NUM_TOKENS)]
    plain = [token_id for token_id in dict.fromkeys(ids) if token_id not in special and token_id > 3]
    plain = plain or [0]
    return torch.tensor((plain * NUM_TOKENS)[:NUM_TOKENS])
