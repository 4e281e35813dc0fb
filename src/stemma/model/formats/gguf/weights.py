"""Weights of a GGUF file under transformers' names, row by row as transformers orders them.

llama.cpp's converter renames tensors, stacks experts, stores Gemma's norms plus one, and puts the rows of
Llama's queries and keys that rotate together next to each other. All of that is undone here. Every tensor of
the file must be one that the family has, in the shape that the config makes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from stemma.errors import ModelError
from stemma.model.families.gguf import ROTARY_FACTORS
from stemma.model.formats.gguf.config import form_of
from stemma.model.formats.gguf.tensors import is_kept, is_read, raw_data, split, widen
from stemma.model.formats.summary import FormatCounts
from stemma.model.gguf_header import GGUFHeader, GGUFTensor
from stemma.model.weights.quantized import QuantizedWeight
from stemma.model.weights.stored import DeferredWeight, StoredWeights

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_Read: TypeAlias = Callable[[], npt.NDArray[np.uint8]]
"""Reads the bytes of a weight, [rows, bytes of a row]."""
_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,8})\.)?(\w+)\.(weight|bias)", re.ASCII)


def read_weights(
    header: GGUFHeader, config: Any, dtype: torch.dtype, *, keep: bool = True
) -> tuple[StoredWeights, FormatCounts]:
    """Return all weights under transformers' names, and how many stayed quantized.

    With `keep`, matrices whose type allows it stay quantized, but not embeddings that no head shares, whose
    rows are only looked up; all else becomes `dtype`. Raises ModelError naming a tensor that no model of the
    family has, or whose type isn't read.
    """
    weights: dict[str, torch.Tensor | DeferredWeight] = {}
    kept: Counter[str] = Counter()
    widened: Counter[str] = Counter()
    head = "output" if "output.weight" in header.tensors else "token_embd"
    for tensor in header.tensors.values():
        if tensor.name == ROTARY_FACTORS:
            continue
        if not is_read(tensor.type):
            raise ModelError(f"{header.path}: {tensor.name} is of type {tensor.type.name}, which isn't read")
        is_product = len(tensor.shape) > 1 and (tensor.name != "token_embd.weight" or head == "token_embd")
        quantized = keep and is_kept(tensor.type) and is_product
        if len(tensor.shape) > 1:
            (kept if quantized else widened)[tensor.type.name] += 1
        for name, read in _parts(header, tensor, config):
            if quantized:
                shape = torch.Size(tensor.shape[-2:])
                weights[name] = DeferredWeight(shape, partial(_split, header, tensor, read))
            else:
                weights[name] = _plain(header, tensor, name, read(), dtype)
    return StoredWeights(weights), FormatCounts(dict(kept), dict(widened))


@contextmanager
def _named(header: GGUFHeader, tensor: GGUFTensor) -> Iterator[None]:
    """Let errors say which tensor they are about."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{header.path}: {tensor.name}: {error}") from error


def _split(header: GGUFHeader, tensor: GGUFTensor, read: _Read) -> QuantizedWeight:
    data = read()
    with _named(header, tensor):
        return split(data, tensor.type)


def _plain(
    header: GGUFHeader, tensor: GGUFTensor, name: str, data: npt.NDArray[np.uint8], dtype: torch.dtype
) -> torch.Tensor:
    with _named(header, tensor):
        if (offset := form_of(header).norm_offset) and name.endswith("norm.weight"):
            return (widen(data, tensor.type, torch.float32) - offset).to(dtype)
        return widen(data, tensor.type, dtype)


def find_broken(header: GGUFHeader, name: str) -> GGUFTensor | None:
    """Return a tensor with NaN or infinite values that the weight `name` is made of; None: there is none.

    `name` is transformers', which joins a layer's experts: so what shares the name's module is looked at.
    """
    module = name.rpartition(".")[0] + "."
    for tensor in header.tensors.values():
        if tensor.name == ROTARY_FACTORS:
            continue
        for part, expert in _names(header, tensor):
            wide = torch.float64 if tensor.type.name == "F64" else torch.float32
            if part.startswith(module) and not bool(
                torch.isfinite(widen(raw_data(tensor, expert), tensor.type, wide)).all()
            ):
                return tensor
    return None


def _names(header: GGUFHeader, tensor: GGUFTensor) -> Iterator[tuple[str, int | None]]:
    """Yield the name of each weight that a tensor holds, with its expert's number if it holds one per expert.

    Raises ModelError if the family has no such tensor.
    """
    match = _NAME.fullmatch(tensor.name)
    layer, part, kind = match.groups() if match else (None, "", "")
    if layer is not None and part in _EXPERTS and len(tensor.shape) == 3:
        for expert in range(tensor.shape[0]):
            yield f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERTS[part]}.{kind}", expert
        return
    renamed = (_TOP if layer is None else form_of(header).layer_names).get(part)
    if renamed is None or len(tensor.shape) > 2:
        raise ModelError(
            f"{header.path} has a tensor that no {header.architecture} model has: {tensor.name} "
            f"{list(tensor.shape)}"
        )
    yield f"{renamed}.{kind}" if layer is None else f"model.layers.{layer}.{renamed}.{kind}", None


def _parts(header: GGUFHeader, tensor: GGUFTensor, config: Any) -> Iterator[tuple[str, _Read]]:
    """Yield name and reader of each weight that a tensor holds: one, or one per expert."""
    for name, expert in _names(header, tensor):
        read: _Read = partial(raw_data, tensor, expert)
        projection = name.split(".")[-2]
        if form_of(header).pairs_rotate and projection in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if projection == "q_proj" else config.num_key_value_heads
            _check_heads(header, tensor, heads)
            read = partial(_half_rotated, tensor, heads)
        yield name, read


def _check_heads(header: GGUFHeader, tensor: GGUFTensor, num_heads: int) -> None:
    if tensor.shape[0] % (2 * num_heads):
        raise ModelError(f"{header.path}: {tensor.name} has {tensor.shape[0]} rows for {num_heads} heads")


def _half_rotated(tensor: GGUFTensor, num_heads: int) -> npt.NDArray[np.uint8]:
    """Read the rows of a query or key weight or bias, num_heads * dim of them, in transformers' order.

    llama.cpp stores rows that rotate together next to each other; transformers half a head apart.
    """
    data = raw_data(tensor)
    rows = data if data.ndim == 2 else data.reshape(tensor.shape[0], -1)
    order = np.arange(rows.shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return rows[order].reshape(data.shape)
