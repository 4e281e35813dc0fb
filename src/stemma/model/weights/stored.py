"""The weights of a checkpoint by name; quantized ones are made from their files when they are asked for.

Weights in FP8 stay codes, and are made plain when they are asked for, unless whoever asks takes codes.
Codes in memory take a byte a weight, whatever their bits, and a plain copy takes two or four: all of them
together are several times what the model takes once it is packed. So a reader looks at each quantized weight
once, to refuse a damaged file early, and lets it go; packing makes it again, weight by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from stemma.model.weights.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True)
class DeferredWeight:
    """A quantized weight that lies in its file."""

    shape: torch.Size
    """[num_outputs, num_inputs]."""
    make: Callable[[], QuantizedWeight]
    """Reads it. Raises ModelError if the file is damaged."""


@dataclass(frozen=True, slots=True)
class CodedFloats:
    """A weight in FP8 as its file has it: a code times its scale, in float32, rounded to `dtype`."""

    codes: torch.Tensor
    """[.., num_outputs, num_inputs]: float8_e4m3fn, or floats that any code stands for."""
    scales: torch.Tensor
    """float32 [.., num_outputs, num_groups], one for all numbers or for each `group_size` inputs of a row."""
    group_size: int
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the codes."""
        return self.codes.shape

    def plain(self) -> torch.Tensor:
        """Return the numbers."""
        factor = self.scales.repeat_interleave(self.group_size, -1)[..., : self.codes.shape[-1]]
        return (self.codes.float() * factor).to(self.dtype)

    def rows(self, chosen: slice) -> CodedFloats:
        """Return some outputs: a view."""
        return replace(self, codes=self.codes[chosen], scales=self.scales[chosen])


class StoredWeights(Mapping[str, "torch.Tensor | QuantizedWeight"]):
    """Names are those of the checkpoint in the format of transformers: `model.layers.0.mlp.up_proj.weight`.

    Each look-up of a quantized weight makes it anew.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor | DeferredWeight | CodedFloats], *, in_memory: bool = False
    ) -> None:
        """`in_memory`: plain tensors don't lie in their file."""
        self._weights = weights
        self.in_memory = in_memory

    def __getitem__(self, name: str) -> torch.Tensor | QuantizedWeight:
        """Return a weight; raise KeyError, or ModelError if its file is damaged."""
        found = self._weights[name]
        if isinstance(found, CodedFloats):
            return found.plain()
        return found.make() if isinstance(found, DeferredWeight) else found

    def coded(self, name: str) -> CodedFloats | None:
        """Return a weight that a file has in FP8; None: it isn't one."""
        found = self._weights[name]
        return found if isinstance(found, CodedFloats) else None

    def __iter__(self) -> Iterator[str]:
        """Yield all names."""
        return iter(self._weights)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._weights)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all weights by name, without making any."""
        return {name: found.shape for name, found in self._weights.items()}

    def dequantized(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return all weights as tensors, the quantized ones as `dtype`."""
        return {
            name: weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight
            for name, weight in self.items()
        }

    def deferred(self) -> dict[str, DeferredWeight]:
        """Return the quantized ones by name, without making them."""
        return {name: found for name, found in self._weights.items() if isinstance(found, DeferredWeight)}
