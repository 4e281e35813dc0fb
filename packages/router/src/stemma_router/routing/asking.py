"""A request's prompt as a router is told of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import xxhash

from stemma.errors import StemmaError
from stemma.server.door.caller import caller
from stemma.server.door.ledger import shared
from stemma.supervision import LoggingSupervisor
from stemma.types import TokenArray
from stemma.workers import WorkerThreads
from stemma_router.cluster.routers import RoutedRequest
from stemma_router.kv_events.names import chain_of
from stemma_router.routing.prompts import (
    has_images,
    head_of,
    max_output_of,
    messages_of,
    num_characters,
    pooled_head_of,
    text_of,
    tokens_of,
)

if TYPE_CHECKING:  # torch isn't needed to pass requests on
    from stemma.model.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

TOKENIZE_TIMEOUT_S = 5.0
CHARS_PER_TOKEN = 4
"""Characters that count as a token in a prompt whose tokens aren't known."""
_NUM_ENCODERS = 2
_MAX_WAITING = 256


def ask_of(
    body: Mapping[str, Any],
    tokens: TokenArray | None,
    block_size: int,
    root: int = 0,
    other_sizes: Iterable[int] = (),
) -> RoutedRequest:
    """Return the request as a router sees it; without `tokens`, the beginning of the text decides.

    `root`: of the adapter's blocks; 0: of the base model's. `other_sizes`: of blocks that some servers have.
    """
    head, max_output = number_of(head_of(body)), max_output_of(body)
    if tokens is None:
        return RoutedRequest(
            (), max(1, num_characters(body) // CHARS_PER_TOKEN), block_size, head, max_output
        )
    chain = chain_of(tokens, block_size, root)
    if chain and messages_of(body) is None:
        head = 0  # the first block, so that a longer prompt has the same home
    chains = {size: chain_of(tokens, size, root) for size in other_sizes}
    return RoutedRequest(chain, len(tokens), block_size, head, max_output, chains)


def pooled_ask_of(body: Mapping[str, Any], block_size: int) -> RoutedRequest:
    """Return a request to one of `POOLED` as a router sees it: it goes where others with its query went."""
    num_tokens = max(1, len(orjson.dumps(body)) // CHARS_PER_TOKEN)
    return RoutedRequest((), num_tokens, block_size, number_of(pooled_head_of(body)), max_output=0)


def number_of(head: bytes) -> int:
    """Return a hash of a prompt's beginning, for rendezvous hashing; never 0."""
    return xxhash.xxh3_64_intdigest(head) or 1


class PromptEncoder:
    """Tokenizes prompts with a tokenizer of its own, off the event loop and under a time limit."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from stemma_router.routing.reading import PromptReader  # needs torch

        self._reader = PromptReader(tokenizer)
        waiting = shared("tokenizing_queue", "prompts that wait to be tokenized", _MAX_WAITING)
        self._threads = WorkerThreads(_NUM_ENCODERS, "stemma-route-tokenizer", LoggingSupervisor(), waiting)

    async def tokens(self, path: str, body: dict[str, Any]) -> TokenArray | None:
        """Return the prompt's token ids; None if they can't be had."""
        given = tokens_of(body)
        if given is not None:
            return as_tokens(given)
        text, messages = text_of(body), messages_of(body)
        if (text is None and messages is None) or (messages is not None and has_images(messages)):
            return None
        read = partial(self._reader.read, path, body)
        try:
            return await self._threads.run(
                read, limit_s=TOKENIZE_TIMEOUT_S, what="tokenizing", owner=caller().tenant
            )
        except StemmaError as error:
            _log.warning("a prompt's place in the caches isn't known: %s", error)
            return None

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


def as_tokens(ids: list[int]) -> TokenArray | None:
    """Return ids as an array [n] int32; None if one can't be an id."""
    return np.asarray(ids, dtype=np.int32) if all(0 <= one < 2**31 for one in ids) else None
