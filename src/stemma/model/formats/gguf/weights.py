"""Weights of a GGUF file under transformers' names, as transformers has them.

llama.cpp's converter renames tensors, stacks experts, cuts layers apart that transformers joins, and stores
some tensors otherwise (families/gguf_changes.py). All of that is undone here. Every tensor of the file must
be one that the family has, in the shape that the config makes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from stemma.errors import ModelError
from stemma.model.families.gguf import ROTARY_FACTORS, GGUFForm
from stemma.model.families.gguf_changes import Change
from stemma.model.files.gguf_header import GGUFHeader, GGUFTensor
from stemma.model.formats.gguf.config import form_of
from stemma.model.formats.gguf.pieces import TensorPiece, Whole
from stemma.model.formats.gguf.tensors import is_read, raw_data, widen
from stemma.model.formats.summary import FormatCounts
from stemma.model.weights.stored import DeferredWeight, StoredWeights

_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,8})\.)?([\w.]+?)(\.weight|\.bias)?", re.ASCII)


def read_weights(
    header: GGUFHeader, config: Any, dtype: torch.dtype, *, keep: bool = True
) -> tuple[StoredWeights, FormatCounts]:
    """Return all weights under transformers' names, and how many stayed quantized.

    With `keep`, matrices whose type allows it stay quantized; all else becomes `dtype`. Raises ModelError
    naming a tensor that no model of the family has, or whose type isn't read.
    """
    weights: dict[str, torch.Tensor | DeferredWeight] = {}
    stays: dict[str, bool] = {}
    for name, whole in _wholes(header, config).items():
        tensors = [piece.tensor for piece in whole.pieces]
        quantized = keep and whole.may_be_codes
        stays |= {tensor.name: quantized for tensor in tensors}
        if quantized:
            weights[name] = DeferredWeight(whole.shape, whole.codes)
        else:
            weights[name] = whole.plain(dtype)
    kept, widened = Counter[str](), Counter[str]()
    for name, quantized in stays.items():
        if len((tensor := header.tensors[name]).shape) > 1:
            (kept if quantized else widened)[tensor.type.name] += 1
    return StoredWeights(weights, in_memory=True), FormatCounts(dict(kept), dict(widened))


def find_broken(header: GGUFHeader, name: str) -> GGUFTensor | None:
    """Return a tensor with NaN or infinite values that the weight `name` is made of; None: there is none.

    `name` is transformers', which joins a layer's experts: so what shares the name's module is looked at.
    """
    form = form_of(header)
    modules = tuple(f"{each.rpartition('.')[0]}." for each in (name, *_parts_of(form, name)))
    for tensor in _used(header):
        for part, expert in _names(header, form, tensor):
            wide = torch.float64 if tensor.type.name == "F64" else torch.float32
            if part.startswith(modules) and not bool(
                torch.isfinite(widen(raw_data(tensor, expert), tensor.type, wide)).all()
            ):
                return tensor
    return None


def _parts_of(form: GGUFForm, name: str) -> Iterator[str]:
    """Yield the names of what a joined weight is made of."""
    for joined, join in form.joins.items():
        if name.endswith(f".{joined}"):
            yield from (name.removesuffix(joined) + part for part in join.parts)


def _wholes(header: GGUFHeader, config: Any) -> dict[str, Whole]:
    """Return what each weight is made of, by name."""
    form, pieces = form_of(header), dict[str, TensorPiece]()
    for tensor in _used(header):
        if not is_read(tensor.type):
            raise ModelError(f"{header.path}: {tensor.name} is of type {tensor.type.name}, which isn't read")
        for name, expert in _names(header, form, tensor):
            change = form.change(_within_layer(name), config) or Change()
            if name in pieces:
                raise ModelError(f"{header.path}: {tensor.name} and {pieces[name].tensor.name} are the same")
            pieces[name] = TensorPiece(header, tensor, expert, change)
            pieces[name].check()
    wholes = dict(_joined(header, form, config, pieces))
    return wholes | {name: Whole((piece,)) for name, piece in pieces.items()}


def _joined(
    header: GGUFHeader, form: GGUFForm, config: Any, pieces: dict[str, TensorPiece]
) -> Iterator[tuple[str, Whole]]:
    """Yield the weights that are joined; their pieces are taken out."""
    layers = sorted({name.removesuffix(_within_layer(name)) for name in pieces})
    for layer in layers:
        for joined, join in form.joins.items():
            found = [pieces.pop(layer + part, None) for part in join.parts]
            present = [piece for piece in found if piece is not None]
            if not present:
                continue
            if len(present) < len(found):
                raise ModelError(
                    f"{header.path}: {present[0].tensor.name} lacks what goes with it; download it again"
                )
            for piece in present:
                piece.check_dimensions(join.dimensions)
            rows = None if join.rows is None else join.rows(config)
            whole = Whole(tuple(present), rows, join.plain)
            if rows is not None and len(rows) != whole.shape[0]:
                raise ModelError(
                    f"{header.path}: {present[0].tensor.name} and what goes with it have {whole.shape[0]} "
                    f"rows, its metadata make {len(rows)}"
                )
            yield layer + joined, whole


def _within_layer(name: str) -> str:
    """Return a weight's name without the path of its layer."""
    parts = name.split(".", 3)
    return parts[3] if name.startswith("model.layers.") else name


def _used(header: GGUFHeader) -> Iterator[GGUFTensor]:
    """Yield the tensors that are weights, without those of layers that guess tokens."""
    form = form_of(header)
    count, guessing = (
        header.metadata.get(f"{header.architecture}.{key}") for key in ("block_count", "nextn_predict_layers")
    )
    end = count - guessing if type(count) is int and type(guessing) is int else None
    for tensor in header.tensors.values():
        layer = _NAME.fullmatch(tensor.name)
        is_guessing = end is not None and layer is not None and layer[1] is not None and int(layer[1]) >= end
        if tensor.name != ROTARY_FACTORS and tensor.name not in form.read_by_config and not is_guessing:
            yield tensor


def _names(header: GGUFHeader, form: GGUFForm, tensor: GGUFTensor) -> Iterator[tuple[str, int | None]]:
    """Yield the name of each weight that a tensor holds, with its expert's number if it holds one per expert.

    Raises ModelError if the family has no such tensor.
    """
    match = _NAME.fullmatch(tensor.name)
    layer, part, kind = match.groups("") if match else ("", "", "")
    prefix = f"model.layers.{layer}." if layer else ""
    if layer and kind == ".weight" and part in form.experts and len(tensor.shape) == 3:
        for expert in range(tensor.shape[0]):
            yield f"{prefix}{form.experts[part].format(expert)}.weight", expert
        return
    names = form.layer_names if layer else form.top_names
    whole = names.get(f"{part}{kind}")
    renamed = whole if whole is not None else names.get(part)
    if renamed is None or (whole is None and (not kind or len(tensor.shape) > 2)):
        raise ModelError(
            f"{header.path} has a tensor that no {header.architecture} model has: {tensor.name} "
            f"{list(tensor.shape)}"
        )
    yield prefix + (renamed if whole is not None else renamed + kind), None
