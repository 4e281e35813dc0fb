"""Loads a checkpoint's vision encoder, and runs it an image at a time: no image's bits depend on others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

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


class VisionEncoder:
    """Makes vectors of images. One thread at a time."""

    def __init__(self, config: VisionConfig, tower: Tower, packing: Packing) -> None:
        """Take a tower whose weights are loaded; its linear layers are packed."""
        self.config = config
        self.num_bytes = sum(p.numel() * p.element_size() for p in tower.modules.parameters())
        """Of all weights."""
        self._tower = tower
        modules = tower.modules
        pack_linears(modules, ModuleWeights(modules, {}), packing, plain_layers(modules), lambda _share: None)
        self._operations = RowwiseOperations(packing.kernels)

    @torch.inference_mode()
    def encode(self, pixels: Pixels) -> torch.Tensor:
        """Return the vectors of one image, as `Tower.encode`."""
        with self._operations:
            return self._tower.encode(pixels).contiguous()


def load_encoder(
    path: Path, config: VisionConfig, stored: Sequence[StoredTensor], dtype: torch.dtype, packing: Packing
) -> VisionEncoder:
    """Return the encoder with its weights, in `dtype`. Raises ModelError if its config makes others."""
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
        tower.modules.requires_grad_(False)
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
