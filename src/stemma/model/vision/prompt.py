"""A prompt with images: ids in place of placeholders, and what the model reads there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stemma.errors import InvalidRequest
from stemma.model.vision.family import Expansion, Pixels, VisionFamily, positions_on_grids
from stemma.prefix.image_ids import FIRST_IMAGE_ID, MIN_IMAGE_TOKENS, image_ids
from stemma.types import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class ReadImage:
    """An image that was decoded, not yet in a prompt."""

    digest: bytes
    """SHA-256 of its pixels as decoded, and of all that decides what the encoder is given of them."""
    expansion: Expansion
    pixels: Callable[[], Pixels]
    """Makes what the encoder takes."""
    name: str
    """Says where it stands in the request, e.g. ``image 2 of message 3``."""
    num_bytes: int = 0
    """Memory that it takes: its own, or of what `pixels` has made of it already."""

    def named(self, name: str) -> ReadImage:
        """Return the same image in another place."""
        return replace(self, name=name)


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image in a prompt."""

    digest: bytes
    pixels: Callable[[], Pixels]
    name: str
    positions: npt.NDArray[np.int64]
    """[N], ascending: the tokens of the prompt that its vectors stand for."""
    num_leading: int
    """Tokens before the first of them that open the image."""

    @property
    def span(self) -> range:
        """Positions from the tokens that open it to its last one."""
        return range(int(self.positions[0]) - self.num_leading, int(self.positions[-1]) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of one prompt, and how its tokens are counted."""

    placeholder_id: int
    """The vocabulary's token that stood where ids of images stand."""
    images: tuple[PromptImage, ...]
    """In the order of the prompt."""
    axes: npt.NDArray[np.int64] | None = None
    """[3, T]: positions of the prompt's tokens along time, height and width; None: the model has one axis."""
    offset: int = 0
    """What to add to the number of a later token for its position along each axis."""
    num_tokens: int = 0
    """T."""
    are_whole: bool = False
    """Whether an image's tokens see each other both ways, so that one step computes them all."""

    def positions(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return positions [3, end - start] of tokens [start, end), of the prompt or behind it."""
        assert self.axes is not None
        behind = np.arange(max(start, self.num_tokens), max(end, self.num_tokens)) + self.offset
        return np.concatenate((self.axes[:, start:end], np.broadcast_to(behind, (3, len(behind)))), axis=1)

    def whole_end(self, start: int) -> int:
        """Return the end of the image that has token `start`, if one step computes it all; else `start`."""
        image = self._image_over(start)
        return start if image is None else image.stop

    def last_cut(self, start: int, end: int) -> int:
        """Return the last position within [start, end] at which a step over tokens from `start` on may end.

        That is `start` where all of them belong to an image that goes on behind them.
        """
        image = self._image_over(end)
        return end if image is None else max(start, image.start)

    def _image_over(self, position: int) -> range | None:
        """Return the range of the image that has this token, if one step computes it; None: there is none."""
        if not self.are_whole:
            return None
        spans = (range(int(one.positions[0]), int(one.positions[-1]) + 1) for one in self.images)
        return next((one for one in spans if position in one), None)

    def image_at(self, position: int) -> PromptImage | None:
        """Return the image that a position belongs to, if it does."""
        return next((one for one in self.images if position in one.span), None)


def vocabulary_ids(tokens: TokenArray, images: PromptImages | None) -> TokenArray:
    """Return `tokens` with the placeholder where ids of images stand."""
    if images is None:
        return tokens
    return np.where(tokens >= FIRST_IMAGE_ID, np.int32(images.placeholder_id), tokens)


def place_images(
    tokens: TokenArray, images: Sequence[ReadImage], placeholder_id: int, family: VisionFamily
) -> tuple[TokenArray, PromptImages]:
    """Return `tokens` with ids of `images` in place of placeholders, and the images in their places.

    Raises InvalidRequest if there are more placeholders than the images have, or fewer.
    """
    where = np.flatnonzero(tokens == placeholder_id)
    if len(where) != sum(one.expansion.num_tokens for one in images):
        raise InvalidRequest(
            "the text of the messages holds the model's own placeholder for images; take it out",
            param="messages",
        )
    result, end, placed = tokens.copy(), 0, []
    for one in images:
        begin, end = end, end + one.expansion.num_tokens
        if one.expansion.num_tokens < MIN_IMAGE_TOKENS:
            raise InvalidRequest(
                f"{one.name} is too small: the processor makes {one.expansion.num_tokens} tokens of it, and "
                f"at least {MIN_IMAGE_TOKENS} tell images apart; send a larger one",
                param="messages",
            )
        positions = where[begin:end]
        result[positions] = image_ids(one.digest, len(positions))
        placed.append(PromptImage(one.digest, one.pixels, one.name, positions, family.num_leading))
    grids = [one.expansion.grid for one in images if one.expansion.grid is not None]
    if len(grids) < len(images) or not images:
        return result, PromptImages(
            placeholder_id, tuple(placed), num_tokens=len(tokens), are_whole=family.num_whole is not None
        )
    axes, offset = positions_on_grids(len(tokens), [int(one.positions[0]) for one in placed], grids)
    return result, PromptImages(placeholder_id, tuple(placed), axes, offset, len(tokens))
