"""Reads the images of prompts as a checkpoint's own processor does, without its modules for other media."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stemma.errors import ConfigError, InvalidRequest
from stemma.foreign_code import ForeignCode
from stemma.model.text.tokenizer import Tokenizer
from stemma.model.vision.decoding import (
    KEPT_BYTES_PER_PIXEL,
    NEEDS_PILLOW,
    ImageLimits,
    as_rgb,
    check_size,
    decode_image,
    digest_of,
    reading_bytes,
)
from stemma.model.vision.family import Expansion, Pixels, VisionConfig
from stemma.model.vision.prompt import PromptImages, ReadImage, place_images
from stemma.model.vision.sources import ImageSource, bytes_of_data_url, is_data_url, split_images
from stemma.types import TokenArray

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_KNOWN = 4096
"""Images whose expansion is remembered."""
_LIBRARIES = ("pillow", "transformers", "torch")
"""Another version of these may make other numbers of the same image."""


class ImageReader:
    """Makes images ready for prompts of one model. Thread-safe."""

    def __init__(self, path: Path, config: VisionConfig, tokenizer: Tokenizer, limits: ImageLimits) -> None:
        """Read the processor's settings in `path`.

        Raises ConfigError without Pillow, ModelError where the checkpoint's files don't go together.
        """
        try:
            import PIL  # noqa: F401
            from transformers import AutoImageProcessor
        except ImportError as error:
            raise ConfigError(NEEDS_PILLOW) from error
        self.limits = limits
        self._config, self._tokenizer = config, tokenizer
        with ForeignCode(f"no usable image processor in {path}", "; take preprocessor_config.json too"):
            auto: Any = AutoImageProcessor
            self._processor: Any = auto.from_pretrained(str(path), local_files_only=True, backend="pil")
            settings = self._processor.to_dict()
            described = json.dumps(settings, sort_keys=True, default=str)
            self.placeholder_id = int(config.whole.image_token_id)
            self._shown: str = tokenizer.token_text(config.family.shown_as(config.whole))
        config.family.check_processor(settings)
        versions = [f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES]
        named = "\0".join((config.family.architecture, described, *versions))
        self._settings = hashlib.sha256(named.encode()).digest()
        self._known: OrderedDict[tuple[str, bytes], Expansion] = OrderedDict()
        self._lock = threading.Lock()

    def text(self, text: object, images: Sequence[Any]) -> tuple[TokenArray, PromptImages | None]:
        """Return the ids of a text with a placeholder for each image, and these. Raises InvalidRequest."""
        if not isinstance(text, str):
            raise InvalidRequest("a prompt with images is a text", param="prompts")
        read = [self.read(ImageSource(one, f"image {number}")) for number, one in enumerate(images, 1)]
        return self.prompt(text, read, add_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[TokenArray, PromptImages | None]:
        """Return the ids of a conversation, and its images. Raises InvalidRequest."""
        rendered, sources = split_images(messages)
        text = self._tokenizer.render_chat(rendered)
        return self.prompt(text, [self.read(one) for one in sources], add_special_tokens=False)

    def reading_bytes(self, data: bytes, name: str) -> int:
        """Return how much memory it takes to read the image in a file's bytes. Raises InvalidRequest."""
        return reading_bytes(data, self.limits, name)

    def read_bytes(self, data: bytes, name: str, owner: str = "") -> ReadImage:
        """Return the image in a file's bytes. Raises InvalidRequest, which calls it `name`.

        Only what `owner` had read before is known from before: time tells nobody of another's images.
        """
        return self._read(decode_image(data, self.limits, name), name, owner)

    def read(self, source: ImageSource) -> ReadImage:
        """Return an image that lies in the request itself. Raises InvalidRequest, for http URLs too."""
        given = source.given
        if isinstance(given, str) and is_data_url(given):
            given = bytes_of_data_url(given, self.limits, source.name)
        if isinstance(given, bytes):
            return self.read_bytes(given, source.name)
        if isinstance(given, str) or not hasattr(given, "convert"):
            raise InvalidRequest(
                f"{source.name} must be a data: URL, a file's bytes or an image of Pillow's", param="messages"
            )
        return self.read_image(given, source.name)

    def prompt(
        self, text: str, images: Sequence[ReadImage], *, add_special_tokens: bool
    ) -> tuple[TokenArray, PromptImages | None]:
        """Return the ids of a rendered prompt with a placeholder for each image, and the images in it.

        Raises InvalidRequest.
        """
        if not images:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens), None
        expanded = self.expand(text, images)
        return self.place(self._tokenizer.encode(expanded, add_special_tokens=add_special_tokens), images)

    def read_image(self, image: Image, name: str) -> ReadImage:
        """Return an image of Pillow's. Raises InvalidRequest, which calls it `name`."""
        check_size(image.size, self.limits, name)
        return self._read(as_rgb(image, name), name)

    def expand(self, text: str, images: Sequence[ReadImage]) -> str:
        """Return a rendered conversation with all that stands for its images where each had one placeholder.

        Raises InvalidRequest unless it has a placeholder for each.
        """
        pieces = text.split(self._shown)
        if len(pieces) != len(images) + 1:
            raise InvalidRequest(
                f"the rendered messages hold {self._shown} {len(pieces) - 1} times, which stands for an "
                f"image, and there are {len(images)} images; take it out of the text, or use a template that "
                "shows images",
                param="messages",
            )
        expansions = [one.expansion.text for one in images]
        return "".join(part for pair in zip(pieces, [*expansions, ""], strict=True) for part in pair)

    def place(self, tokens: TokenArray, images: Sequence[ReadImage]) -> tuple[TokenArray, PromptImages]:
        """Return the ids of an expanded text with those of its images. Raises InvalidRequest."""
        return place_images(tokens, images, self.placeholder_id, self._config.family)

    def _read(self, image: Image, name: str, owner: str = "") -> ReadImage:
        digest = digest_of(image, self._settings)
        pixels, num_bytes = partial(self._process, image, name), KEPT_BYTES_PER_PIXEL * math.prod(image.size)
        key = (owner, digest)
        with self._lock:
            expansion = self._known.get(key)
        if expansion is None:
            made = pixels()
            pixels, num_bytes = partial(_same, made), sum(one.nbytes for one in made.values())
            expansion = self._config.family.expand(self._config.whole, made, self._tokenizer.token_text)
            with self._lock:
                self._known[key] = expansion
                while len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        return ReadImage(digest, expansion, pixels, name, num_bytes)

    def _process(self, image: Image, name: str) -> Pixels:
        """Return what the processor makes of an image. Raises InvalidRequest for one that it can't take."""
        try:
            found = self._processor([image], return_tensors="np", **self._config.family.processor_options)
        except Exception as error:  # of extreme proportions, for instance
            raise InvalidRequest(
                f"{name} is {image.size[0]} x {image.size[1]} pixels, which the processor can't take: "
                f"{str(error)[:200]}",
                param="messages",
            ) from error
        return {key: np.asarray(value) for key, value in found.items()}


def _same(pixels: Pixels) -> Pixels:
    return pixels
