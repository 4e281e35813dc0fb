"""Loads a checkpoint's vision encoder, and runs it an image at a time: no image's bits depend on others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from stemma.errors import ModelError
from stemma.foreign_code import ForeignCode
from stemma.model.cpu.packing import Packing
from stemma.model.files.directory import StoredTensor
from stemma.model.foreign.linears import pack_linears, plain_layers
from stemma.model.foreign.rowwise import RowwiseOperations
from stemma.model.foreign.weights import ModuleWeights
from stemma.model.formats.weight_check import check_finite
from stemma.model.opened.checkpoint import read_plain
from stemma.model.vision.checkpoint import check_tower
from stemma.model.vision.family import Pixels, Tower, VisionConfig

HOST = torch.device("cpu")


class VisionEncoder:
    """Makes vectors of images. One thread at a time."""

    def __init__(self, config: VisionConfig, tower: Tower, packing: Packing | None) -> None:
        """Take a tower whose weights are loaded; its linear layers are packed, if anything packs them."""
        self.config = config
        self.num_bytes = sum(p.numel() * p.element_size() for p in tower.modules.parameters())
        """Of all weights."""
        self._tower = tower
        modules = tower.modules
        self._operations: AbstractContextManager[Any] = nullcontext()
        if packing is not None:
            weights, plain = ModuleWeights(modules, {}), plain_layers(modules)
            pack_linears(modules, weights, packing, plain, lambda _share: None)
            self._operations = RowwiseOperations(packing.kernels)

    @torch.inference_mode()
    def encode(self, pixels: Pixels) -> torch.Tensor:
        """Return the vectors of one image, as `Tower.encode`, in the host's memory."""
        with self._operations:
            return self._tower.encode(pixels).contiguous().cpu()


def load_encoder(
    path: Path,
    config: VisionConfig,
    stored: Sequence[StoredTensor],
    dtype: torch.dtype,
    packing: Packing | None,
    device: torch.device = HOST,
) -> VisionEncoder:
    """Return the encoder with its weights, in `dtype`, on `device`.

    Raises ModelError if its config makes others.
    """
    make = config.family.make_tower
    advice = "; compare config.json with the one the checkpoint was published with"
    with ForeignCode(f"can't load the vision encoder of {path}", advice):
        _check_depth(path, config, len(stored))
        with torch.device("meta"):
            check_tower(path, make(config.whole, dtype).modules, stored)
        tower = make(config.whole, dtype)
        with torch.no_grad():
            state = tower.modules.state_dict()
            for name, weight in read_plain(list(stored)).items():
                check_finite(path, name, weight)
                state[name].copy_(weight)
        tower.modules.requires_grad_(False).to(device)
    return VisionEncoder(config, tower, packing)


def _check_depth(path: Path, config: VisionConfig, num_tensors: int) -> None:
    """Raise ModelError for more layers than there are tensors: making them would take long."""
    vision = config.whole.vision_config
    depth = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", 0)
    if type(depth) is not int or depth > num_tensors:
        raise ModelError(f"{path}: config.json says that the vision encoder has {depth} layers")
    sizes = [value for value in vision.to_dict().values() if type(value) is int]
    if any(math.log2(max(1, abs(value))) > 31 for value in sizes):
        raise ModelError(f"{path}: config.json names a size of the vision encoder that no model has")
