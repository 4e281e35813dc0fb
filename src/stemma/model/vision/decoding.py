"""From the bytes of a file to an image, by Pillow. The bytes come from clients: sizes are checked first."""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stemma.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Of an animation the first frame is taken."""
_DIGESTED_ROWS = 64
"""Rows of an image that are copied at once for its digest."""
NEEDS_PILLOW = "images need Pillow: pip install 'stemma-llm[vision]'"


READING_BYTES_PER_PIXEL = 20
"""Memory that reading an image takes at most, whatever its format; the file may be a thousandth of it."""
KEPT_BYTES_PER_PIXEL = 4
"""That of an image in RGB, as Pillow has it."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds of one image."""

    max_bytes: int
    """Of the file."""
    max_pixels: int
    """Of what it decodes to: width times height."""


def reading_bytes(data: bytes, limits: ImageLimits, name: str) -> int:
    """Return how much memory reading the image in `data` takes, by its header. Errors as `decode_image`."""
    with _opened(data, limits, name) as image:
        width, height = image.size
        return int(READING_BYTES_PER_PIXEL * width * height)


def decode_image(data: bytes, limits: ImageLimits, name: str) -> Image:
    """Return the image in `data` as RGB, upright and over white; of an animation the first frame.

    `name` says in errors which it is. Raises InvalidRequest for what is no image, too large, or not of
    `FORMATS`.
    """
    from PIL import ImageOps

    with _opened(data, limits, name) as image:
        ImageOps.exif_transpose(image, in_place=True)
        return _over_white(image)


@contextmanager
def _opened(data: bytes, limits: ImageLimits, name: str) -> Iterator[Image]:
    """Open an image within the limits. Raises InvalidRequest, also for what its decoding raises meanwhile."""
    from PIL import Image, UnidentifiedImageError

    if len(data) > limits.max_bytes:
        raise InvalidRequest(f"{name} has more than {limits.max_bytes} bytes", param="messages")
    with _decoding(name), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is ours
        try:
            opened = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError as error:
            too_large = f"{name} has more than {limits.max_pixels} pixels"
            raise InvalidRequest(too_large, param="messages") from error
        except UnidentifiedImageError as error:
            raise InvalidRequest(f"{name} is no image in PNG, JPEG, WebP or GIF", param="messages") from error
        with opened:
            check_size(opened.size, limits, name)
            yield opened


def as_rgb(image: Image, name: str) -> Image:
    """Return a copy of `image` in RGB, turned as its EXIF says; what is transparent lies over white.

    Raises InvalidRequest, which calls it `name`, for what can't be decoded.
    """
    from PIL import ImageOps

    with _decoding(name):
        return _over_white(ImageOps.exif_transpose(image))


def _over_white(image: Image) -> Image:
    """Return an image in RGB. What it is made of goes as soon as it may: each is 4 bytes a pixel."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    found = Image.alpha_composite(white, image if image.mode == "RGBA" else image.convert("RGBA"))
    del white
    return found.convert("RGB")


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Turn what decoding raises into an InvalidRequest."""
    try:
        yield
    except InvalidRequest:
        raise
    except Exception as error:  # Pillow raises anything for damaged files
        raise InvalidRequest(
            f"{name} can't be decoded: {type(error).__name__}: {str(error)[:200]}", param="messages"
        ) from error


def check_size(size: tuple[int, int], limits: ImageLimits, name: str) -> None:
    """Raise InvalidRequest for an image of no pixels, or of too many."""
    width, height = size
    if width < 1 or height < 1 or width * height > limits.max_pixels:
        raise InvalidRequest(
            f"{name} is {width} x {height} pixels; at most {limits.max_pixels} in all are taken",
            param="messages",
        )


def digest_of(image: Image, settings: bytes) -> bytes:
    """Return SHA-256 of an RGB image's size and pixels behind `settings`."""
    digest = hashlib.sha256(struct.pack("<Q", len(settings)) + settings)
    digest.update(struct.pack("<QQ", *image.size))
    width, height = image.size
    for top in range(0, height, _DIGESTED_ROWS):
        rows = (0, top, width, min(height, top + _DIGESTED_ROWS))
        digest.update(image.crop(rows).tobytes())
    return digest.digest()
