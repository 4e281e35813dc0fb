"""Weights must be finite. If one isn't, the error names the file to download or convert again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from stemma.errors import ModelError
from stemma.model.files.directory import StoredTensor, is_gguf
from stemma.model.formats.checkpoint import CheckpointTensors

_REPORT_BYTES = 1 << 28
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"})
_LAYER = re.compile(r"\.([0-9]+)\.")


def check_weights(model: nn.Module, path: Path, progress: Callable[[float], None]) -> None:
    """Check all parameters of `model` by `check_finite`; `progress` gets the share done, 0..1."""
    parameters = list(model.named_parameters())
    unreported_bytes = 0
    for number, (name, parameter) in enumerate(parameters):
        unreported_bytes += parameter.nbytes
        if unreported_bytes > _REPORT_BYTES:
            progress(number / len(parameters))
            unreported_bytes = 0
        if parameter.is_floating_point():
            check_finite(path, name, parameter)
    progress(1.0)


def check_finite(path: Path, name: str, weight: torch.Tensor) -> None:
    """Raise ModelError if a weight has NaN or infinite values, naming it and where `path` holds it."""
    # A sum reads at memory speed (torch's isfinite: a fortieth of that), and NaN and infinity show in it.
    # So may an overflow, which the slow check then rules out.
    if torch.isfinite(weight.sum()):
        return
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        what = f"weight {name} has {bad} values that are NaN or infinite"
        raise ModelError(f"{what}; {_cause(path, name, weight.dtype)}")


def _cause(path: Path, name: str, dtype: torch.dtype) -> str:
    """Return where the values of a weight come from, and what to do."""
    found: tuple[str, Path] | None = None
    if is_gguf(path):
        # Not at the top: the package gguf takes time to import.
        from stemma.model.files.gguf_header import read_header
        from stemma.model.formats.gguf.weights import find_broken

        in_gguf = find_broken(read_header(path), name)
        found = None if in_gguf is None else (in_gguf.name, path)
    elif stored := _find_broken(CheckpointTensors(path), name):
        found = (stored.name, stored.file)
    if found is None:
        named = str(dtype).removeprefix("torch.")
        return f"in {path} they are finite, but too large for {named}; set another dtype"
    alias = "" if found[0] == name else f" (there {found[0]})"
    return f"they come from {found[1]}{alias}, download or convert it again"


def _find_broken(tensors: CheckpointTensors, name: str) -> StoredTensor | None:
    """Return a stored tensor that isn't finite and that the weight `name` is made of; None: there is none.

    transformers renames some weights and joins others, and scales lie beside theirs. So what has the weight's
    module in its name is looked at, and if nothing has, all tensors, beginning with those of its layer.
    """
    floats = [tensor for tensor in tensors.stored.values() if tensor.dtype in _FLOATS]
    module = name.rpartition(".")[0] + "."
    candidates = [tensor for tensor in floats if tensor.name.startswith(module)]
    if not candidates:
        layer = _LAYER.findall(name)[:1]
        candidates = sorted(floats, key=lambda tensor: _LAYER.findall(tensor.name)[:1] != layer)
    for tensor in candidates:
        values = tensors.read(tensor.name)
        values = values.float() if values.element_size() == 1 else values  # of FP8 torch knows too little
        if not torch.isfinite(values).all():
            return tensor
    return None
