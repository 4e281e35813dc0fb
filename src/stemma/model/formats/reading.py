"""Which reader a checkpoint needs, by its format: all but plain tensors of floats.

A package brings a further one by the entry point group ``stemma.formats``: a `FormatReader`, under the value
of `quantization_config.quant_method` that names its format, or msModelSlim's under `modelslim`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from stemma import guests
from stemma.errors import UnsupportedModel
from stemma.model.files.directory import description_file, is_gguf, read_json
from stemma.model.formats.checkpoint import CheckpointTensors
from stemma.model.formats.summary import FormatCounts
from stemma.model.weights.stored import StoredWeights

GROUP = "stemma.formats"
FormatReader: TypeAlias = Callable[
    [CheckpointTensors, dict[str, Any], torch.dtype], tuple[StoredWeights, FormatCounts]
]
"""From tensors, what describes them, and the type of plain weights, to what `read_quantized` returns.

What describes them is `quantization_config`; msModelSlim's is the content of its description file."""
GGUF, MODELSLIM = "gguf", "modelslim"
READERS = {
    "compressed-tensors": "stemma.model.formats.compressed_tensors",
    "gptq": "stemma.model.formats.gptq",
    "awq": "stemma.model.formats.awq",
    "fp8": "stemma.model.formats.fp8",
    "mxfp8": "stemma.model.formats.fp8",
    "mxfp4": "stemma.model.formats.mxfp4",
}
"""By `quantization_config.quant_method` of config.json: the module with the format's `read_weights`."""


def find_format(path: Path, quantization: dict[str, Any]) -> str | None:
    """Return the name of the format that a reader here reads; None: transformers reads the checkpoint.

    `quantization` is what config.json says about it, maybe nothing. Raises ModelError as `description_file`.
    """
    if is_gguf(path):
        return GGUF
    if description_file(path) is not None:
        return MODELSLIM
    method = quantization.get("quant_method")
    is_read = method in READERS or (method is not None and str(method) in guests.names(GROUP))
    return str(method) if is_read else None


def read_quantized(
    path: Path, name: str, quantization: dict[str, Any], config: Any, dtype: torch.dtype, *, prefix: str = ""
) -> tuple[StoredWeights, FormatCounts]:
    """Return all weights of a checkpoint in the format `name`, and how many stayed quantized.

    With `prefix`, those whose names begin with it (not of GGUF).

    Names are those of a plain checkpoint; plain weights that were dequantized are of `dtype`. `config` is
    that of transformers. Raises ModelError if the file is damaged or contradicts itself, UnsupportedModel for
    what the format knows and the reader doesn't, or if no installed package reads the format.
    """
    if name == GGUF:
        from stemma.model.files.gguf_header import read_header
        from stemma.model.formats.gguf.weights import read_weights

        return read_weights(read_header(path), config, dtype)
    tensors = CheckpointTensors(path, prefix)
    if name == MODELSLIM:
        described = description_file(path)
        assert described is not None
        return _guest_reader(path, name)(tensors, read_json(described), dtype)
    if name not in READERS:
        return _guest_reader(path, name)(tensors, quantization, dtype)
    read: FormatReader = import_module(READERS[name]).read_weights
    return read(tensors, quantization, dtype)


def _guest_reader(path: Path, name: str) -> FormatReader:
    """Return the reader that a package brings.

    Raises UnsupportedModel if none does, ConfigError if it can't be imported.
    """
    if (reader := guests.load(GROUP, name)) is None:
        raise UnsupportedModel(
            f"{path}: checkpoints of msModelSlim are read by {guests.to_install('stemma-mindie')}"
        )
    return cast(FormatReader, reader)
