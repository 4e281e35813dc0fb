"""How large config.json makes a model, against what the files hold.

transformers builds all that config.json counts before it looks at a weight, and fills what the files lack
with random numbers: a damaged or hostile count takes all time or all memory. So counts that make loops have a
limit, and the model is first built without memory (on torch's device `meta`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from stemma.errors import ModelError
from stemma.model.files.directory import StoredTensor

_LIMITS = {
    re.compile(r"(?:^|_)(?:n|num|decoder|encoder)_(?:\w+_)?layers?$"): 4096,
    re.compile(r"(?:^|_)(?:n|num)_(?:\w+_)?experts$"): 65_536,
}
"""Names of fields that a loop counts to, and a number far above all published models'."""
_LONGEST_NAME = 100
"""Longest name of a field of any config; longer names would make the search take long."""
_SPARE_NUMBERS = 1 << 24
"""Numbers that a model of any size may have beside its weights: tables of positions, masks."""
_FEWEST_BITS = 2
"""Bits of the smallest quantized weight."""
_FLOAT_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64}
_ADVICE = "take config.json from where the checkpoint comes from"


def check_counts(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError if a config.json counts layers or experts that no checkpoint has."""
    for name, value in _fields(raw):
        if type(value) is not int or len(name) > _LONGEST_NAME:
            continue
        for pattern, limit in _LIMITS.items():
            if value > limit and pattern.search(name):
                shown = value if value < 1 << 64 else "a number of more than 64 bits"
                raise ModelError(
                    f"{path}: config.json says that {name} is {shown}; no model has more than {limit}: "
                    f"{_ADVICE}"
                )


def check_extent(path: Path, config: Any, stored: Iterable[StoredTensor]) -> None:
    """Raise ModelError if `config` makes a model of far more numbers than the files hold.

    `config` is one of transformers' own; what transformers raises if it makes no model comes through.
    """
    from transformers import AutoModelForCausalLM

    tensors = list(stored)
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if type(num_layers) is int and num_layers > len(tensors):
        raise ModelError(
            f"{path}: config.json says that num_hidden_layers is {num_layers}, but the files have "
            f"{len(tensors)} tensors in all: {_ADVICE}"
        )
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(copy.deepcopy(config), attn_implementation="eager")
    made = sum(part.numel() for part in (*model.parameters(), *model.buffers()))
    held = sum(_most_numbers(tensor) for tensor in tensors)
    if made > 2 * held + _SPARE_NUMBERS:
        raise ModelError(
            f"{path}: config.json makes a model of {made:,} numbers, the files hold {held:,} at most; the "
            f"two belong to different models: {_ADVICE}"
        )


def _fields(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of an object and of all objects in it."""
    waiting: list[Mapping[str, Any]] = [raw]
    while waiting:
        for name, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            yield name, value


def _most_numbers(tensor: StoredTensor) -> int:
    """Return how many weights a tensor may hold: its elements, or codes in its bytes."""
    return tensor.num_bytes * 8 // _FLOAT_BITS.get(tensor.dtype, _FEWEST_BITS)
