"""A checkpoint whose config is read and whose weights are about to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stemma.config.settings import ModelSettings
from stemma.errors import ModelError, UnsupportedModel
from stemma.model.files.directory import StoredTensor, open_safetensors, stored_tensors
from stemma.model.formats.reading import find_format, read_quantized
from stemma.model.formats.summary import FormatCounts
from stemma.model.opened.checkpoint_config import STORED_DTYPES, dtype_of, quantization_of, runs_remote_code
from stemma.model.vision.checkpoint import split_tensors
from stemma.model.vision.family import VisionConfig
from stemma.model.weights.named import Weight
from stemma.model.weights.stored import DeferredWeight, StoredWeights


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The parts that a decoder is made of."""

    path: Path
    config: Any
    dtype: torch.dtype
    """The dtype that the model has in memory."""
    stored: list[StoredTensor]
    method: str | None
    """How weights are quantized, by name; None: they are plain."""
    quantized: StoredWeights | None
    """All weights, if a reader of ours reads the format; None: they are plain, or transformers reads them."""
    counts: FormatCounts
    """Counts of the formats that the reader found."""
    tower: list[StoredTensor] = field(default_factory=list)
    """Of the vision encoder; the fields above are of the language model."""
    has_whole_images: bool = False
    """Whether tokens of an image see each other, those behind them too: no native step computes that."""

    @property
    def codes(self) -> dict[str, DeferredWeight]:
        """The weights that stay quantized, by name."""
        return {} if self.quantized is None else self.quantized.deferred()

    @property
    def is_readable(self) -> bool:
        """Whether all weights can be read here: plain floats, or a format that a reader knows."""
        if self.quantized is not None:
            return True
        return self.method is None and all(tensor.dtype in STORED_DTYPES for tensor in self.stored)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights that `is_readable` promises, by name."""
        if self.quantized is None:
            return {tensor.name: tuple(tensor.shape) for tensor in self.stored}
        return {name: tuple(shape) for name, shape in self.quantized.shapes().items()}

    def weights(self) -> Mapping[str, Weight]:
        """Return all weights by name; plain ones stay in their files until they are read."""
        return read_plain(self.stored) if self.quantized is None else self.quantized


def open_checkpoint(settings: ModelSettings, config: Any, vision: VisionConfig | None = None) -> DecoderParts:
    """Return the checkpoint of `settings`; what a reader of ours reads is looked through.

    `config` is that of the language model; `vision` that of the encoder before it, if it has one.

    Raises ModelError if it is damaged, UnsupportedModel for what no reader knows.
    """
    path = settings.path
    stored = stored_tensors(path)
    if vision is not None:
        return _open_with_tower(settings, config, vision, stored)
    quantization = quantization_of(config)
    format_name = find_format(path, quantization)
    dtype = dtype_of(settings, config, stored)
    if format_name is None:
        method = _check_method(path, quantization)
        return DecoderParts(path, config, dtype, stored, method, None, FormatCounts())
    if runs_remote_code(settings):
        raise UnsupportedModel(
            f"{path}: quantized weights ({format_name}) under the checkpoint's own code aren't served"
        )
    if dtype == torch.float16 and settings.dtype == "auto":
        dtype = torch.bfloat16  # our products know no float16
    weights, counts = read_quantized(path, format_name, quantization, config, dtype)
    return DecoderParts(path, config, dtype, stored, format_name, weights, counts)


def _open_with_tower(
    settings: ModelSettings, config: Any, vision: VisionConfig, stored: list[StoredTensor]
) -> DecoderParts:
    path, architecture = settings.path, vision.family.architecture
    if quantization_of(vision.whole) or any(tensor.dtype not in STORED_DTYPES for tensor in stored):
        raise UnsupportedModel(
            f"{path}: {architecture} with quantized weights isn't served; take the unquantized checkpoint "
            "(quantize rounds its language model)"
        )
    split = split_tensors(path, vision.family, stored)
    dtype = dtype_of(settings, config, split.text)
    whole = vision.family.num_whole is not None
    return DecoderParts(path, config, dtype, split.text, None, None, FormatCounts(), split.tower, whole)


def read_plain(stored: list[StoredTensor]) -> dict[str, torch.Tensor]:
    """Return all tensors of the files, which stay there until they are read."""
    files = {file: open_safetensors(file) for file in {tensor.file for tensor in stored}}
    return {tensor.name: files[tensor.file].get_tensor(tensor.stored_name) for tensor in stored}


def _check_method(path: Path, quantization: dict[str, Any]) -> str | None:
    """Return the quantization's name, or None; raise ModelError if neither we nor transformers read it."""
    if not quantization:
        return None
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    method = quantization.get("quant_method")
    if quantization.get("load_in_8bit") or quantization.get("load_in_4bit"):
        return "bitsandbytes"
    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    if method not in known:
        raise ModelError(
            f"{path} is quantized by {method!r}, which neither Stemma nor transformers reads; take "
            "the unquantized checkpoint, or one in FP8 (quant_method fp8)"
        )
    return str(method)
