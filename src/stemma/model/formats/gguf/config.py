"""From a GGUF file's metadata to the config of transformers; families/ know how each family's look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf import dequantize

from stemma.errors import UnsupportedModel
from stemma.model.families.gguf import Fields, GGUFForm
from stemma.model.families.registry import GGUF_FORMS
from stemma.model.files.gguf_header import GGUFHeader
from stemma.model.files.gguf_keys import shown
from stemma.model.formats.gguf.tensors import raw_data

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def form_of(header: GGUFHeader) -> GGUFForm:
    """Return how the file's family looks. Raises UnsupportedModel for an architecture that isn't read."""
    has_experts = bool(header.metadata.get(f"{header.architecture}.expert_count"))
    form = GGUF_FORMS.get((header.architecture, has_experts))
    form = form or GGUF_FORMS.get((header.architecture, False))
    if form is None:
        known = dict.fromkeys(name for name, _ in GGUF_FORMS)
        raise UnsupportedModel(
            f"{header.path} holds the architecture {shown(header.architecture)}; read from GGUF are "
            f"{', '.join(known)}. Give the directory of the original checkpoint"
        )
    return form


def read_config(header: GGUFHeader) -> PreTrainedConfig:
    """Return the config of the model in a GGUF file.

    Raises UnsupportedModel for an architecture that isn't read, ModelError for metadata that are missing or
    contradict the tensors.
    """
    fields = Fields(header, lambda name: _floats(header, name))
    config = form_of(header).config(fields)
    fields.check_all_used()
    return config


def _floats(header: GGUFHeader, name: str) -> list[float]:
    tensor = header.tensors[name]
    numbers: list[float] = dequantize(raw_data(tensor), tensor.type).reshape(-1).tolist()
    return numbers
