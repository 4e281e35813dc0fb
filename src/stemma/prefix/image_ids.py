"""Ids of an image's tokens: pieces of its hash, so that equal ids mean equal images.

In a prompt, a model's placeholder token stands for each vector that its vision encoder makes of an image. All
images have the same placeholders, and KV depends on the image. So a prompt carries these ids in place of
placeholders, from the moment its images are known until the model looks up embeddings. Whatever compares,
hashes or stores tokens tells images apart by that alone: indexes, block keys, tiers, KV events.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from stemma.types import TokenArray

FIRST_IMAGE_ID = 1 << 30
"""Ids from here on are pieces of hashes; no vocabulary reaches so far."""
MIN_IMAGE_TOKENS = 4
"""Ids that say which image it is: 120 bits. No image has fewer tokens, and no hit ends with fewer of one."""


def image_ids(digest: bytes, num_tokens: int) -> TokenArray:
    """Return the ids [num_tokens], int32, of the image with this digest."""
    stream = hashlib.shake_256(b"stemma image\0" + digest).digest(4 * num_tokens)
    pieces = np.frombuffer(stream, dtype="<u4") & np.uint32(FIRST_IMAGE_ID - 1)
    return (pieces | np.uint32(FIRST_IMAGE_ID)).astype(np.int32)


def are_images(tokens: TokenArray) -> npt.NDArray[np.bool_]:
    """Return for each token, [T], whether it belongs to an image."""
    return tokens >= FIRST_IMAGE_ID


def told_apart(tokens: TokenArray, num_tokens: int) -> int:
    """Return how many of the leading `num_tokens` that matched are sure to be of the same images.

    A match that ends behind the first few tokens of an image may be of another one, whose hash begins alike:
    it ends before the image then.
    """
    if num_tokens >= len(tokens) or tokens[num_tokens] < FIRST_IMAGE_ID:
        return num_tokens
    tail = are_images(tokens[max(0, num_tokens - MIN_IMAGE_TOKENS) : num_tokens])
    num_of_image = len(tail) if tail.all() else int(np.argmin(tail[::-1]))
    return num_tokens if num_of_image >= MIN_IMAGE_TOKENS else num_tokens - num_of_image


def before_images(tokens: TokenArray) -> TokenArray:
    """Return the leading tokens that belong to no image: what a model may be thought to say."""
    found = np.flatnonzero(are_images(tokens))
    return tokens[: int(found[0])] if len(found) else tokens
