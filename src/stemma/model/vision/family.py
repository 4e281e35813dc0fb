"""What Stemma knows of the vision models of one class of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Pixels: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""What an image processor of transformers returns for one image, by name."""


def pixels_for(modules: torch.nn.Module, pixels: Pixels, name: str) -> torch.Tensor:
    """Return what a processor gave by that name, where the modules' weights are."""
    return torch.from_numpy(pixels[name]).to(next(modules.parameters()).device)


TokenText: TypeAlias = Callable[[int], str]
"""Takes a token of the vocabulary; returns its text."""


class Tower(Protocol):
    """A checkpoint's vision encoder: modules of transformers, with their weights."""

    modules: torch.nn.Module

    def encode(self, pixels: Pixels) -> torch.Tensor:
        """Return what stands for one image's N placeholders, [1 + F, N, H] in the model's dtype.

        First the vectors in place of embeddings, then what is added behind each of the first F layers.
        """


class Encoder(Protocol):
    """A vision encoder that is ready to run. One thread at a time."""

    config: VisionConfig

    def encode(self, pixels: Pixels) -> torch.Tensor:
        """Return the vectors of one image, as `Tower.encode`."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """What becomes of an image in a rendered prompt."""

    text: str
    """Takes the place of one placeholder token."""
    num_tokens: int
    """Placeholders in it: the image's vectors."""
    grid: tuple[int, int] | None = None
    """Rows and columns of these vectors, for models that count positions along both; None: others."""


def _image_token_id(config: Any) -> int:
    return int(config.image_token_id)


def _accept(_settings: Mapping[str, Any]) -> None:
    pass


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One class of transformers with a vision encoder before a causal language model."""

    model_type: str
    """Of config.json."""
    architecture: str
    text_name: Callable[[str], str | None]
    """Takes a tensor's name in the checkpoint; returns that in the language model alone, None of others."""
    tower_name: Callable[[str], str | None]
    """The same for the modules of the tower."""
    make_tower: Callable[[Any, torch.dtype], Tower]
    """Takes the whole config; the weights are still to be loaded."""
    expand: Callable[[Any, Pixels, TokenText], Expansion]
    """Takes the whole config, what the processor returned for an image, and what gives a token's text."""
    processor_options: Mapping[str, Any]
    """Keywords for the image processor, beside the image."""
    num_leading: int
    """Tokens of an expansion, or of the template, that open an image before its first placeholder."""
    shown_as: Callable[[Any], int] = _image_token_id
    """Takes the whole config; returns the token that stands for an image in a rendered prompt."""
    num_whole: Callable[[Any], int] | None = None
    """Takes the whole config; returns an image's tokens, which see each other both ways, so that one step
    computes them all. None: each sees those before it."""
    check_processor: Callable[[Mapping[str, Any]], None] = _accept
    """Takes the image processor's settings; raises UnsupportedModel for those that aren't served."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """What a checkpoint says of its vision encoder."""

    family: VisionFamily
    whole: Any
    """The config of both models, of transformers."""


def positions_on_grids(
    num_tokens: int, firsts: list[int], grids: list[tuple[int, int]]
) -> tuple[npt.NDArray[np.int64], int]:
    """Return positions [3, T] of a prompt's tokens along time, height and width, and what to add behind it.

    Image number i has one token for each cell of ``grids[i]``, from token ``firsts[i]`` on. All of an image
    is at one time; text behind it goes on after the largest position. The number returned is the position of
    token T, less T.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    end = position = 0
    for first, (height, width) in zip(firsts, grids, strict=True):
        positions[:, end:first] = np.arange(first - end) + position
        position += first - end
        end = first + height * width
        positions[0, first:end] = position
        positions[1, first:end] = np.repeat(np.arange(height), width) + position
        positions[2, first:end] = np.tile(np.arange(width), height) + position
        position += max(height, width)
    positions[:, end:] = np.arange(num_tokens - end) + position
    return positions, position - end
