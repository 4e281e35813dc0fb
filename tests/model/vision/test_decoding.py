"""What an image looks like to a model: upright, and over white where it is transparent."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from stemma.errors import InvalidRequest
from stemma.model.vision.decoding import (
    KEPT_BYTES_PER_PIXEL,
    ImageLimits,
    as_rgb,
    decode_image,
    digest_of,
    reading_bytes,
)
from tests.model.vision.readers import reader_of
from tests.vision_checkpoints import picture

LIMITS = ImageLimits(1 << 20, 1 << 20)
ORIENTATION = 274


def file_of(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()


def logo() -> Image.Image:
    """Black, with an alpha of all values."""
    alpha = np.arange(256, dtype=np.uint8).reshape(16, 16)
    return Image.fromarray(np.dstack([np.zeros((16, 16, 3), np.uint8), alpha]))


def with_palette() -> Image.Image:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 10, 10])
    image.info["transparency"] = 1
    return image


MAKERS: dict[str, Callable[[], Image.Image]] = {
    "RGBA": logo,
    "LA": lambda: logo().convert("LA"),
    "PA": lambda: logo().convert("PA"),
    "palette": with_palette,
    "RGB": lambda: picture(1),
    "grey": lambda: picture(1).convert("L"),
    "CMYK": lambda: picture(1).convert("CMYK"),
}


@pytest.mark.parametrize("mode", MAKERS)
def test_what_is_transparent_lies_over_white_as_in_transformers(mode: str) -> None:
    image = MAKERS[mode]()
    expected = np.asarray(convert_to_rgb(image))
    assert np.array_equal(np.asarray(as_rgb(image, "it")), expected)
    if image.has_transparency_data:
        assert expected.max() == 255
        for kind in ("PNG", "WEBP"):
            if mode in ("RGBA", "LA"):
                read = decode_image(file_of(image, format=kind, lossless=True, exact=True), LIMITS, "it")
                assert np.array_equal(np.asarray(read), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("family", ["smolvlm"])
def test_every_door_turns_an_image_as_its_exif_says(orientation: int, family: str, vision_path: Any) -> None:
    plain = picture(3, 40, 30)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = file_of(plain, format="PNG", exif=exif)
    reader = reader_of(vision_path)
    from_bytes = reader.read_bytes(data, "it")
    assert reader.read_image(Image.open(io.BytesIO(data)), "it").digest == from_bytes.digest
    assert (reader.read_image(plain, "it").digest == from_bytes.digest) is (orientation == 1)
    size = decode_image(data, LIMITS, "it").size
    assert size == ((40, 30) if orientation < 5 else (30, 40))


@pytest.mark.parametrize("family", ["smolvlm"])
def test_a_damaged_image_of_pillows_is_refused_by_name(family: str, vision_path: Any) -> None:
    image = Image.open(io.BytesIO(file_of(picture(1), format="PNG")[:300]))
    with pytest.raises(InvalidRequest, match="picture 7 can't be decoded"):
        reader_of(vision_path).read_image(image, "picture 7")


def memory() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_of(work: Callable[[], object]) -> int:
    """Return how many bytes more there were at most meanwhile."""
    before, seen, is_over = memory(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            seen.append(memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    is_over.set()
    watcher.join()
    return max(seen)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "exif"])
def test_reading_takes_what_the_budget_counts(kind: str) -> None:
    """28 bytes a pixel where 3 were counted."""
    side = 1800
    image = Image.new("RGBA", (side, side), (9, 9, 9, 90))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    options = {"exif": exif} if kind == "exif" else {}
    data = file_of(image, format="PNG" if kind == "exif" else kind, **options)
    limits = ImageLimits(1 << 20, side * side)
    counted = reading_bytes(data, limits, "it")
    assert peak_of(lambda: digest_of(decode_image(data, limits, "it"), b"")) < 1.2 * counted


@pytest.mark.parametrize("family", ["smolvlm"])
def test_what_another_has_read_is_not_known_from_before(family: str, vision_path: Any) -> None:
    reader, data = reader_of(vision_path), file_of(picture(5, 40, 30), format="PNG")
    first, again, other = (reader.read_bytes(data, "it", owner).num_bytes for owner in ("ada", "ada", "bob"))
    assert again == KEPT_BYTES_PER_PIXEL * 40 * 30 != first
    assert other == first


def test_the_image_given_is_left_as_it_is() -> None:
    image = picture(1)
    before = image.tobytes()
    as_rgb(image, "it").putpixel((0, 0), (1, 2, 3))
    assert image.tobytes() == before
