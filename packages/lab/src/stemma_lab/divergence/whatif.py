"""A replay of recorded prompts as if a value had stood at their end, or tools been the same: what it saves.

Prompts are replayed in order of arrival through the index and the eviction policy that serve requests,
twice: as they were, and with the value cut out and put at the end, or with the tools as the first prompt had
them, in its order or also its very list. A prompt is served in an instant, and answers are not replayed: both
runs leave these out alike, and only their difference is used.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stemma.insight.divergence_window import WholePrompt
from stemma.prefix.eviction.policy import BlockTraits
from stemma.prefix.eviction.registry import make_policy
from stemma.prefix.index import PrefixIndex
from stemma.prefix.keys import KeySpace, Namespace, chain_keys, fingerprints
from stemma.prefix.radix import RadixIndex
from stemma.types import BlockIds, TokenArray
from stemma_lab.divergence.shapes import TokenStarts, value_from

_CONTEXT_TOKENS, _MAX_VALUE_TOKENS = 16, 48
_MAX_ORDERED_TOKENS = 1 << 16
_RESUMED_TOKENS = 32
"""Tokens in which two prompts agree again behind a place where they part."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The cache that the replay assumes."""

    block_size: int
    capacity_blocks: int
    """Blocks of all tiers together."""
    policy: str


class _ReplayedCache:
    def __init__(self, shape: CacheShape) -> None:
        self._size = shape.block_size
        self._capacity = shape.capacity_blocks
        self._index: PrefixIndex = RadixIndex(shape.block_size, make_policy(shape.policy))
        self._space = KeySpace("", "", shape.block_size)
        self._free: list[int] = []
        self._num_ids = 0

    def serve(self, prompt: WholePrompt) -> int:
        """Look up a prompt, enter it, make room; return how many tokens were cached."""
        tokens, now, size = prompt.tokens, prompt.at, self._size
        found = self._index.match(prompt.namespace, tokens[:-1])
        shared = found.block_ids[: found.num_full_blocks(size)]
        if len(shared):
            self._index.touch(shared, now)
        num_full = len(tokens) // size
        fresh = self._take(num_full - len(shared))
        if len(fresh):
            ids: BlockIds = np.concatenate((shared, fresh))
            keys = chain_keys(self._space.root(prompt.namespace), tokens, size)
            traits = BlockTraits(fingerprints(keys))
            added = self._index.insert(prompt.namespace, tokens[: num_full * size], ids, now, traits).added
            self._free.extend(np.setdiff1d(fresh, added).tolist())
        excess = self._index.num_blocks - self._capacity
        if excess > 0:
            self._free.extend(self._index.evict(excess, now).tolist())
        return found.num_tokens

    def _take(self, num_blocks: int) -> BlockIds:
        while len(self._free) < num_blocks:
            self._free.append(self._num_ids)
            self._num_ids += 1
        taken = self._free[len(self._free) - num_blocks :]
        del self._free[len(self._free) - num_blocks :]
        return np.asarray(taken, dtype=np.int32)


def cached_tokens(prompts: Iterable[WholePrompt], shape: CacheShape) -> list[int]:
    """Return how many leading tokens of each prompt a cache of that shape would have served."""
    cache = _ReplayedCache(shape)
    return [cache.serve(prompt) for prompt in prompts]


def moved_to_the_end(
    prompts: Sequence[WholePrompt], shape: str, places: Sequence[int], texts: TokenStarts
) -> tuple[list[WholePrompt], int]:
    """Return the prompts with a value of `shape` that begins at one of `places` put at the end.

    Prompts without one stay as they are. Also returns how many were changed.
    """
    changed = 0
    moved = []
    for prompt in prompts:
        tokens = prompt.tokens
        for place in places:
            value = _find(tokens, place, shape, texts)
            if value is not None:
                start, end = value
                cut: TokenArray = np.concatenate((tokens[:start], tokens[end:], tokens[start:end]))
                tokens = cut
                changed += 1
                break
        moved.append(WholePrompt(prompt.at, prompt.namespace, tokens))
    return moved, changed


def in_one_order(prompts: Sequence[WholePrompt], places: Sequence[int]) -> tuple[list[WholePrompt], int]:
    """Return the prompts as if all of them had what follows one of `places` in the order of the first.

    What a prompt has there is in another order if its tokens are those of the first one, up to some place, in
    another sequence. Other prompts stay as they are. Also returns how many were changed.
    """
    return _as_the_first(prompts, places, _ends_of_order)


def with_one_list(prompts: Sequence[WholePrompt], places: Sequence[int]) -> tuple[list[WholePrompt], int]:
    """Return the prompts as if all of them had what stands at one of `places` as the first has it.

    What was added, left out or written otherwise there ends where both agree again in 32 tokens. Prompts that
    never do stay as they are. Also returns how many were changed.
    """
    return _as_the_first(prompts, places, _ends_of_change)


def _as_the_first(
    prompts: Sequence[WholePrompt],
    places: Sequence[int],
    ends: Callable[[TokenArray, TokenArray], tuple[int, int]],
) -> tuple[list[WholePrompt], int]:
    """Return the prompts with the first one's tokens at `places`; `ends`: how many of it, for how many."""
    firsts: dict[tuple[Namespace, int, bytes], TokenArray] = {}
    changed, ordered = 0, []
    for prompt in prompts:
        tokens = prompt.tokens
        for place in sorted(place for place in places if place < len(tokens)):
            key = (prompt.namespace, place, hashlib.sha256(tokens[:place].tobytes()).digest())
            first = firsts.setdefault(key, tokens)
            theirs, own = ends(first[place:], tokens[place:])
            if theirs or own:
                tokens = np.concatenate((first[: place + theirs], tokens[place + own :]))
        changed += tokens is not prompt.tokens
        ordered.append(WholePrompt(prompt.at, prompt.namespace, tokens))
    return ordered, changed


def _ends_of_order(one: TokenArray, other: TokenArray) -> tuple[int, int]:
    end = _end_of_order(one, other)
    return end, end


def _ends_of_change(one: TokenArray, other: TokenArray) -> tuple[int, int]:
    """Return behind how many tokens of each both go on alike; (0, 0): they never do, or do so at once."""
    one, other = one[:_MAX_ORDERED_TOKENS], other[:_MAX_ORDERED_TOKENS]
    if min(len(one), len(other)) < _RESUMED_TOKENS or one[0] == other[0]:
        return 0, 0
    runs = np.lib.stride_tricks.sliding_window_view(one, _RESUMED_TOKENS)
    starts: dict[bytes, int] = {}
    for start, run in enumerate(runs):
        starts.setdefault(run.tobytes(), start)
    for end, run in enumerate(np.lib.stride_tricks.sliding_window_view(other, _RESUMED_TOKENS)):
        if (found := starts.get(run.tobytes())) is not None:
            return found, end
    return 0, 0


def _end_of_order(one: TokenArray, other: TokenArray) -> int:
    """Return after how many tokens both have had the same ones, in different orders; 0: never."""
    length = min(len(one), len(other), _MAX_ORDERED_TOKENS)
    if not length or one[0] == other[0]:
        return 0
    lacking: Counter[int] = Counter()
    num_open = 0
    for end, (mine, theirs) in enumerate(zip(one[:length].tolist(), other[:length].tolist(), strict=True), 1):
        for token, step in ((mine, 1), (theirs, -1)):
            before = lacking[token]
            lacking[token] = before + step
            num_open += abs(before + step) - abs(before)
        if not num_open:
            return end
    return 0


def _find(tokens: TokenArray, place: int, shape: str, texts: TokenStarts) -> tuple[int, int] | None:
    """Return the tokens [start, end) of a value of `shape` that begins in token `place`."""
    if place >= len(tokens):
        return None
    first = max(0, place - _CONTEXT_TOKENS)
    ids = tokens[first : place + _MAX_VALUE_TOKENS].tolist()
    text = texts.decode(ids)
    ends = texts.ends(ids, text)
    value = value_from(text, ends[place - first - 1] if place > first else 0, shape)
    if value is None:
        return None
    end = next((n for n, at in enumerate(ends) if at >= value.end), None)
    return None if end is None else (place, first + end + 1)
