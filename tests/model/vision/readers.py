"""Readers of the images of small checkpoints."""

from __future__ import annotations

from pathlib import Path

from stemma.model.text.tokenizer import Tokenizer
from stemma.model.vision.checkpoint import vision_config_of
from stemma.model.vision.decoding import ImageLimits
from stemma.model.vision.reading import ImageReader

LIMITS = ImageLimits(1 << 20, 1 << 20)


def reader_of(path: Path) -> ImageReader:
    from transformers import AutoConfig

    config = vision_config_of(path, AutoConfig.from_pretrained(str(path)))
    assert config is not None
    return ImageReader(path, config, Tokenizer(path), LIMITS)
