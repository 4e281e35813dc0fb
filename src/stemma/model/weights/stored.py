"""The weights of a checkpoint by name; quantized ones are made from their files when they are asked for.

Codes in memory take a byte a weight, whatever their bits, and a plain copy takes two or four: all of them
together are several times what the model takes once it is packed. So a reader looks at each quantized weight
once, to refuse a damaged file early, and lets it go; packing makes it again, weight by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from stemma.model.weights.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True)
class DeferredWeight:
    """A quantized weight that lies in its file."""

    shape: torch.Size
    """[num_outputs, num_inputs]."""
    make: Callable[[], QuantizedWeight]
    """Reads it. Raises ModelError if the file is damaged."""


class StoredWeights(Mapping[str, "torch.Tensor | QuantizedWeight"]):
    """Names are those of the checkpoint in the format of transformers: `model.layers.0.mlp.up_proj.weight`.

    Each look-up of a quantized weight makes it anew.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor | DeferredWeight]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> torch.Tensor | QuantizedWeight:
        """Return a weight; raise KeyError, or ModelError if its file is damaged."""
        found = self._weights[name]
        return found.make() if isinstance(found, DeferredWeight) else found

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
