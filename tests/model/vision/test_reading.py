"""What becomes of images in a prompt, beside transformers' own processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stemma.errors import ConfigError, InvalidRequest, ModelError
from stemma.model.text.tokenizer import Tokenizer
from stemma.model.vision.family import positions_on_grids
from stemma.model.vision.prompt import vocabulary_ids
from stemma.model.vision.sources import split_images
from stemma.prefix.image_ids import are_images
from tests.model.vision.processors import processor_of
from tests.model.vision.readers import reader_of
from tests.vision_checkpoints import IMAGE_TOKENS, VISION_FAMILIES, picture

SIZES = ((90, 60), (200, 100), (33, 170), (128, 128))


def chat_with(images: list[Image.Image]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, one in enumerate(images):
        parts += [{"type": "image", "image": one}, {"type": "text", "text": f"This is number {number}. "}]
    return [
        {"role": "user", "content": parts[:2]},
        {"role": "assistant", "content": [{"type": "text", "text": "I see."}]},
        {"role": "user", "content": parts[2:]},
    ]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_prompts_are_those_of_transformers_processor(family: str, vision_path: Path) -> None:
    reader, processor = reader_of(vision_path), processor_of(family, vision_path)
    images = [picture(number, *size) for number, size in enumerate(SIZES)]
    messages, sources = split_images(chat_with(images))
    text = Tokenizer(vision_path).render_chat(messages)
    read = [reader.read(source) for source in sources]
    tokens, found = reader.prompt(text, read, add_special_tokens=False)
    expected = processor(text=[text], images=images, return_tensors="np", add_special_tokens=False)

    assert found is not None
    assert vocabulary_ids(tokens, found).tolist() == expected["input_ids"][0].tolist()
    assert [one.name for one in found.images] == [
        "image 1 of message 1",
        "image 1 of message 3",
        "image 2 of message 3",
        "image 3 of message 3",
    ]
    patches = [one.pixels()["pixel_values"] for one in found.images]
    joined = np.concatenate(patches, axis=1 if family == "smolvlm" else 0)
    assert np.array_equal(joined, expected["pixel_values"])


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_ids_say_which_image_it_is(family: str, vision_path: Path) -> None:
    reader = reader_of(vision_path)
    text = f"See {IMAGE_TOKENS[family]} here"

    def ids(image: Image.Image) -> list[int]:
        tokens, found = reader.prompt(text, [reader.read_image(image, "it")], add_special_tokens=False)
        assert found is not None
        assert np.array_equal(np.flatnonzero(are_images(tokens)), found.images[0].positions)
        return [int(one) for one in tokens[found.images[0].positions]]

    once, again, other = ids(picture(1)), ids(picture(1)), ids(picture(2))
    nearly = picture(1)
    nearly.putpixel((0, 0), tuple(255 - one for one in nearly.getpixel((0, 0))))

    assert once == again
    for another in (other, ids(nearly)):
        assert len(once) == len(another)
        assert not set(once) & set(another)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_settings_of_the_processor_are_part_of_the_hash(family: str, vision_path: Path, copy_of: Any) -> None:
    changed = copy_of(vision_path)
    file = changed / "preprocessor_config.json"
    file.write_text(file.read_text().replace("{", '{"image_std": [0.25, 0.5, 0.5], ', 1))
    if family == "smolvlm":
        file.write_text(file.read_text().replace(', "image_std": [0.5, 0.5, 0.5]', ""))
    digests = [reader_of(path).read_image(picture(1), "it").digest for path in (vision_path, changed)]
    assert digests[0] != digests[1]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_placeholder_in_a_text_is_no_image(family: str, vision_path: Path) -> None:
    reader = reader_of(vision_path)
    image, token = reader.read_image(picture(1), "it"), IMAGE_TOKENS[family]
    for text in (f"{token} and {token}", "none"):
        with pytest.raises(InvalidRequest, match=r"stands for an image"):
            reader.prompt(text, [image], add_special_tokens=False)
    tokens, found = reader.prompt(f"only {token}", [], add_special_tokens=False)
    assert found is None
    assert not are_images(tokens).any()


@pytest.mark.parametrize("family", ["qwen2.5-vl"])
def test_images_of_too_few_tokens_or_extreme_shape_are_refused(
    family: str, vision_path: Path, copy_of: Any
) -> None:
    with pytest.raises(InvalidRequest, match="processor can't take"):
        reader_of(vision_path).read_image(Image.new("RGB", (1, 2000)), "it")
    changed = copy_of(vision_path)
    file = changed / "preprocessor_config.json"
    file.write_text(file.read_text().replace(str(4 * 28 * 28), str(28 * 28)))
    reader = reader_of(changed)
    small = reader.read_image(picture(1, 28, 28), "image 1")
    with pytest.raises(InvalidRequest, match="image 1 is too small: the processor makes 1 tokens"):
        reader.prompt(IMAGE_TOKENS[family], [small], add_special_tokens=False)


@pytest.mark.parametrize("family", ["smolvlm"])
def test_a_checkpoint_without_its_processor_is_refused(family: str, vision_path: Path, copy_of: Any) -> None:
    changed = copy_of(vision_path)
    (changed / "preprocessor_config.json").unlink()
    (changed / "processor_config.json").unlink()
    with pytest.raises(ModelError, match="no usable image processor"):
        reader_of(changed)


@pytest.mark.parametrize("family", ["smolvlm"])
def test_without_pillow_it_says_what_to_install(
    family: str, vision_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pip install 'stemma-llm\[vision\]'"):
        reader_of(vision_path)


def test_positions_on_grids() -> None:
    positions, offset = positions_on_grids(10, [2], [(2, 3)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert offset == -3
