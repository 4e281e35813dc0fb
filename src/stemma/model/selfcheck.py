"""The self-check at load: this server must compute what the model itself computes.

A class doesn't show whether an architecture counts positions itself, looks ahead, applies a mask that isn't
passed to us, or has its own forward that our fast path would skip. So transformers runs the unchanged model
on a few tokens; once the model is ready to serve, the same tokens run over paged KV in two chunks, and the
logits are compared. Architectures on `TESTED` are compared with transformers by our tests and skip this. For
all architectures, logits must be finite. Of a large model only the first layers run, enough to have each
kind: the check reads weights three times, and an 8B model has 16 GB of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stemma.errors import ModelError, UnsupportedModel
from stemma.memory.device.kv import DeviceKV
from stemma.model.attention import SUPPORTED
from stemma.model.batch import ForwardBatch
from stemma.model.causal_lm import CausalLM
from stemma.model.families.registry import TESTED
from stemma.model.foreign import foreign_code

_BLOCK_SIZE = 8
"""On each of the ranks that tokens are divided over."""
_CHUNKS = (7, 6)
"""The second begins inside a block and ends in another."""
_NUM_TOKENS = sum(_CHUNKS)
LARGE_BYTES = 2 << 30
"""Weights of all layers together above which only some layers are checked."""
_LIMITS = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
"""Maximum error of a chunk's median token, as a share of its logits' spread.

Measured on 75 classes with random weights. Served correctly: at most 1e-6 in float32; in bfloat16 0.03 with 2
layers, 0.02 to 0.08 with 24 and 48, 0.15 for the worst mixture of experts. Served wrongly: 0.46 and more."""


_ROUNDED = {8: 0.2, 4: 0.4}
"""The same where weights have so few bits: the reference comes from the weights before they were rounded."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The model's own logits of the check's tokens."""

    token_ids: torch.Tensor
    """[T] int64, on CPU."""
    logits: torch.Tensor
    """[T, vocab] float32, on CPU."""


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
    other = torch.cat((tokens[: _CHUNKS[0]], tokens[_CHUNKS[0] :].flip(0)))
    both = torch.stack((tokens, other)).to(hf_model.device)
    with foreign_code(f"{name} doesn't compute logits from token ids alone", f". {SUPPORTED}"):
        logits = hf_model(input_ids=both, use_cache=False).logits.float().cpu()
    if logits.shape != (2, _NUM_TOKENS, vocab_size):
        raise UnsupportedModel(
            f"{name} returns logits {list(logits.shape)}, not one row of {vocab_size} a token. {SUPPORTED}"
        )
    _check_finite(name, logits)
    ahead = _error(logits[1, : _CHUNKS[0]], logits[0, : _CHUNKS[0]])
    if ahead > _LIMITS.get(hf_model.dtype, 1e-3):
        raise UnsupportedModel(
            f"{name} isn't causal: the logits of a token change with the tokens after it, so nothing of "
            f"it can be cached. {SUPPORTED}"
        )
    return Reference(tokens, logits[0])


def check_served(model: CausalLM, reference: Reference | None, weight_bits: int | None = None) -> None:
    """Run the check's tokens over paged KV and compare them with `reference`, if there is one.

    Raises ModelError if logits aren't finite, UnsupportedModel if they differ.
    """
    name = model.info.architecture
    if reference is None:
        tokens = torch.arange(1, 4) % model.vocab_size
        with foreign_code(f"{name} fails on its first tokens"):
            _check_finite(name, _run(model, tokens, (len(tokens),)))
        return
    chunks = _CHUNKS if model.max_model_len >= _NUM_TOKENS else (1, model.max_model_len - 1)
    tokens = reference.token_ids[: sum(chunks)]
    with foreign_code(f"{name} can't be served: it fails on a prompt in two chunks", f". {SUPPORTED}"):
        logits = _run(model, tokens, chunks)
    _check_finite(name, logits)
    limit = max(_LIMITS.get(model.dtype, 1e-3), 0.0 if weight_bits is None else _ROUNDED[weight_bits])
    first = _error(logits[: chunks[0]], reference.logits[: chunks[0]])
    second = _error(logits[chunks[0] :], reference.logits[chunks[0] : len(tokens)])
    if first > limit:
        raise UnsupportedModel(
            f"{name} can't be served: over paged KV it computes other logits than by itself (off by "
            f"{first:.0%} of their spread in the first tokens). It may mask attention, or compute positions "
            f"or layers, in a way of its own. {SUPPORTED}"
        )
    if second > limit:
        raise UnsupportedModel(
            f"{name} can't be served: in a prompt's second chunk it computes other logits than by itself "
            f"(off by {second:.0%} of their spread). It may count positions itself or keep state other than "
            f"KV. {SUPPORTED}"
        )


def _prompt(config: Any, vocab_size: int) -> torch.Tensor:
    """Return token ids from the whole vocabulary, without special ones that some models treat differently."""
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    ids = [number * 7919 % vocab_size for number in range(1, 20 * _NUM_TOKENS)]
    plain = [token_id for token_id in dict.fromkeys(ids) if token_id not in special and token_id > 3]
    plain = plain or [0]
    return torch.tensor((plain * _NUM_TOKENS)[:_NUM_TOKENS])


def _run(model: CausalLM, tokens: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
    """Return logits [T, vocab] on CPU of one sequence, computed in chunks over blocks in mixed order."""
    block_size = _BLOCK_SIZE * model.context_size
    num_blocks = -(-len(tokens) // block_size)
    kv = DeviceKV(model.layout(block_size), num_blocks + 1, model.device)
    table = torch.arange(num_blocks, 0, -1, dtype=torch.int32)
    logits: list[torch.Tensor] = []
    start = 0
    for length in chunks:
        positions = torch.arange(start, start + length)
        slots = table[positions // block_size].long() * block_size + positions % block_size
        batch = ForwardBatch(
            token_ids=tokens[start : start + length].to(model.device),
            positions=positions.to(model.device),
            slots=slots.to(model.device),
            query_starts=[0, length],
            context_lens=[start + length],
            block_tables=table[None],
            logits_rows=torch.arange(length, device=model.device),
        )
        logits.append(model.forward(batch, kv).cpu())
        start += length
    return torch.cat(logits)


def _error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the median token's error, as a share of the spread of its logits [T, vocab].

    The median: rounding may route a single token to another expert.
    """
    spread = (reference - reference.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
    return float(((logits - reference).norm(dim=-1) / spread).median())


def _check_finite(name: str, logits: torch.Tensor) -> None:
    if not torch.isfinite(logits).all():
        raise ModelError(
            f"{name} computes logits that are NaN or infinite; the checkpoint is broken, or its numbers "
            "don't fit the dtype: try another (--dtype bfloat16 or float32)"
        )
