"""A checkpoint of two models: what of it is the language model's, and what the vision encoder's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.files.directory import StoredTensor
from stemma.model.vision.family import VisionConfig, VisionFamily
from stemma.model.vision.registry import vision_family_of


def vision_config_of(path: Path, config: Any) -> VisionConfig | None:
    """Return what `config` says of a vision encoder; None where it makes a language model alone.

    Raises ModelError where config.json names another class than its type's.
    """
    family = vision_family_of(config.model_type)
    if family is None:
        return None
    architectures = list(getattr(config, "architectures", None) or [])
    if architectures and family.architecture not in architectures:
        raise ModelError(
            f"{path} holds {', '.join(architectures)}; of the type {family.model_type} only "
            f"{family.architecture} is served"
        )
    return VisionConfig(family, config)


def text_config_of(vision: VisionConfig) -> Any:
    """Return the config of the language model alone."""
    text = copy.deepcopy(vision.whole.get_text_config())
    text.tie_word_embeddings = bool(vision.whole.tie_word_embeddings)
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(vision.whole, "dtype", None)
    return text


@dataclass(frozen=True, slots=True)
class SplitTensors:
    """The tensors of a checkpoint, under the names that each model has for them."""

    text: list[StoredTensor]
    tower: list[StoredTensor]


def split_tensors(path: Path, family: VisionFamily, stored: Sequence[StoredTensor]) -> SplitTensors:
    """Return which tensors are whose. Raises UnsupportedModel for one that is neither's."""
    text, tower = _renamed(stored, family.text_name), _renamed(stored, family.tower_name)
    known = {one.stored_name for one in (*text, *tower)}
    for one in stored:
        if one.stored_name not in known:
            raise UnsupportedModel(
                f"{path}: {one.name} belongs neither to the language model nor to the vision encoder of "
                f"{family.architecture}"
            )
    return SplitTensors(text, tower)


def _renamed(stored: Sequence[StoredTensor], name_of: Callable[[str], str | None]) -> list[StoredTensor]:
    found = [(name_of(one.name), one) for one in stored]
    return sorted(
        (replace(one, name=name) for name, one in found if name is not None), key=lambda one: one.name
    )


def check_tower(path: Path, tower: torch.nn.Module, stored: Sequence[StoredTensor]) -> None:
    """Raise ModelError unless the files hold just the weights that the config makes."""
    made = {name: tuple(tensor.shape) for name, tensor in tower.state_dict().items()}
    held = {one.name: tuple(one.shape) for one in stored}
    for name in sorted(made.keys() | held.keys()):
        if made.get(name) != held.get(name):
            raise ModelError(
                f"{path}: the vision encoder's {name} is {_shown(held.get(name))} in the files, "
                f"{_shown(made.get(name))} by config.json; take both from where the checkpoint comes from"
            )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
