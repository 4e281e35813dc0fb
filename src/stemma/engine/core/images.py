"""Images in a step: vectors in place of tokens. What the encoder made is kept, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from stemma.engine.core.request import Scheduled
from stemma.engine.core.step_rows import StepRows
from stemma.model.attend.batch import ImageRows
from stemma.model.vision.family import Encoder
from stemma.model.vision.prompt import PromptImage


@dataclass(frozen=True, slots=True)
class ImageStats:
    """Counters since the start, and a gauge."""

    num_encoded: int = 0
    """Images that the vision encoder computed."""
    num_reused: int = 0
    """Images whose vectors were kept from before. Those whose KV was cached need none, and count nowhere."""
    cached_bytes: int = 0
    """Memory of the vectors that are kept."""


class ImageVectors:
    """Vectors of the images used last, by salt and digest: who has another salt isn't told by a faster answer
    that somebody sent the same image. Not thread-safe: one owner, the step loop.
    """

    def __init__(self, encoder: Encoder, max_bytes: int) -> None:
        """Beyond `max_bytes` the images used least lately are dropped; the last one is always kept."""
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, bytes], torch.Tensor] = OrderedDict()
        self._num_bytes = self._num_encoded = self._num_reused = 0

    def stats(self) -> ImageStats:
        """Return the counters."""
        return ImageStats(self._num_encoded, self._num_reused, self._num_bytes)

    def of(self, image: PromptImage, first: int = 0, salt: str = "") -> torch.Tensor:
        """Return the vectors [1 + F, N, H] of an image, encoding it unless they are kept for this salt.

        `first`: the first of them that a step wants. An image that several steps share counts once.
        Raises InvalidRequest.
        """
        key = (salt, image.digest)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            self._num_reused += first == 0
            return kept
        vectors = self._encoder.encode(image.pixels())
        assert vectors.shape[1] == len(image.positions)
        self._num_encoded += 1
        self._kept[key] = vectors
        self._num_bytes += vectors.nbytes
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return vectors

    def rows(self, step: StepRows) -> ImageRows | None:
        """Return the rows of a step that are images, and their vectors; None: there are none."""
        rows: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        vectors: list[torch.Tensor] = []
        for item in step.items:
            request = item.sequence.state.request
            images, salt = request.images, request.namespace.salt
            for image in () if images is None else images.images:
                first, end = np.searchsorted(image.positions, (item.start, item.end))
                if first < end:
                    rows.append(image.positions[first:end] + (item.first_row - item.start))
                    vectors.append(self.of(image, int(first), salt)[:, first:end])
        if not rows:
            return None
        found = torch.cat(vectors, dim=1)
        features = found[1:] if len(found) > 1 else None
        return ImageRows(torch.from_numpy(np.concatenate(rows)), found[0], features)


def axes_of(step: StepRows) -> torch.Tensor | None:
    """Return positions [3, T] of a step's rows along three axes; None where these agree in all rows."""
    found = [item.sequence.state.request.images for item in step.items]
    if not any(images is not None and images.axes is not None for images in found):
        return None
    return torch.from_numpy(np.concatenate([_axes(item) for item in step.items], axis=1))


def _axes(item: Scheduled) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    images = item.sequence.state.request.images
    if images is not None and images.axes is not None:
        return images.positions(item.start, item.end)
    return np.tile(np.arange(item.start, item.end), (3, 1))


def limits_of(step: StepRows) -> torch.Tensor | None:
    """Return how many tokens each of a step's rows sees, [T] int32; None: each sees those up to its own."""
    found = [item.sequence.state.request.images for item in step.items]
    if not any(images is not None and images.are_whole for images in found):
        return None
    limits = [np.arange(item.start + 1, item.end + 1, dtype=np.int32) for item in step.items]
    for item, images, rows in zip(step.items, found, limits, strict=True):
        for image in () if images is None or not images.are_whole else images.images:
            first, end = np.searchsorted(image.positions, (item.start, item.end))
            rows[image.positions[first:end] - item.start] = image.positions[-1] + 1
    return torch.from_numpy(np.concatenate(limits))
