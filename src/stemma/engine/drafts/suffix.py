"""Where did this text occur before? Hash chains over n-grams, as in DEFLATE, updated token by token."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from stemma.engine.drafts.index_memory import MAX_CORPUS_TOKENS
from stemma.prefix.image_ids import FIRST_IMAGE_ID
from stemma.prefix.keys import Namespace
from stemma.types import TokenArray

NGRAM = 3
"""Fewest tokens that must be equal."""
_LONGEST = 32
"""Equal tokens after which a longer match is no better."""
_LONGEST_ADDED = 8192
"""Tokens of one sequence that a corpus takes: adding one costs about a microsecond of the step loop."""
_MAX_CHAIN = 8
"""Earlier occurrences looked at."""
_TOKEN_BITS = 21
_SEPARATOR = (1 << _TOKEN_BITS) - 1
_KEY_MASK = (1 << (NGRAM * _TOKEN_BITS)) - 1


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An earlier place where the last `length` tokens were the same; `position` is the token behind them."""

    position: int
    length: int


class SuffixIndex:
    """Token sequences behind each other, searchable by their last tokens. Adding a token is O(1).

    Three tokens of 21 bits make an exact key, so there are no false matches.
    """

    def __init__(self) -> None:
        self._tokens: array[int] = array("i")
        self._last: dict[int, int] = {}
        """n-gram -> position behind its most recent occurrence."""
        self._earlier: array[int] = array("i")
        """For position p: the position behind the occurrence before that of the n-gram ending at p; or -1."""
        self._key = 0
        self._num_since_start = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def start_sequence(self) -> None:
        """End the current sequence: no match or continuation crosses its end."""
        if self._num_since_start:
            self._tokens.append(_SEPARATOR)
            self._earlier.append(-1)
            self._num_since_start = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the current sequence. No continuation crosses those of images."""
        last, earlier, key = self._last, self._earlier, self._key
        num_since_start, end = self._num_since_start, len(self._tokens)
        token_ids = _without_images(token_ids)
        for token_id in token_ids:
            end += 1
            num_since_start += 1
            key = ((key << _TOKEN_BITS) | token_id) & _KEY_MASK
            if num_since_start >= NGRAM:
                earlier.append(last.get(key, -1))
                last[key] = end
            else:
                earlier.append(-1)
        self._tokens.extend(token_ids)
        self._key, self._num_since_start = key, num_since_start

    def find(self, suffix: Sequence[int], *, is_own: bool = False) -> Occurrence | None:
        """Return where the longest tail of `suffix` (the latest of equals) occurred; None if under NGRAM.

        `is_own`: `suffix` is the end of this index itself, which doesn't count.
        """
        num_known = len(suffix)
        if num_known < NGRAM:
            return None
        key = 0
        suffix = _without_images(suffix)
        for token_id in suffix[-NGRAM:]:
            key = (key << _TOKEN_BITS) | token_id
        position = self._last.get(key, -1)
        tokens = self._tokens
        best: Occurrence | None = None
        for _ in range(_MAX_CHAIN):
            if is_own and position == len(tokens):
                position = self._earlier[position - 1]
            if position < 0:
                break
            length, limit = NGRAM, min(num_known, position, _LONGEST)
            while length < limit and tokens[position - length - 1] == suffix[-length - 1]:
                length += 1
            if best is None or length > best.length:
                best = Occurrence(position, length)
                if length == limit:
                    break
            position = self._earlier[position - 1]
        return best

    def continuation(self, position: int, max_tokens: int, *, is_own: bool = False) -> tuple[int, ...]:
        """Return what followed at `position`, up to the border of the sequence.

        `is_own`: the end of the index is the end of the sequence to be continued; a match that runs into it
        is a loop, which goes on.
        """
        found = self._tokens[position : position + max_tokens].tolist()
        if _SEPARATOR in found:
            del found[found.index(_SEPARATOR) :]
        elif is_own and 0 < len(found) < max_tokens:
            period = len(found)
            found = [found[i % period] for i in range(max_tokens)]
        return tuple(found)


def _without_images(token_ids: Sequence[int]) -> Sequence[int]:
    """Return tokens with separators in place of ids of images, which exceed 21 bits. Nobody says those."""
    if not token_ids or max(token_ids) < FIRST_IMAGE_ID:
        return token_ids
    return [min(token_id, _SEPARATOR) for token_id in token_ids]


class SuffixCorpus:
    """Recently finished sequences by namespace: tokens of one tenant are never proposed to another.

    Bounded: a namespace has two generations of up to `max_tokens` tokens, the older of which is dropped
    whole; beyond `max_namespaces`, or `max_total_tokens` of all, the namespaces used least recently are
    dropped.
    """

    def __init__(
        self,
        *,
        max_tokens: int = 32_768,
        max_namespaces: int = 16,
        max_total_tokens: int = MAX_CORPUS_TOKENS,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_total_tokens = max_total_tokens
        self._max_namespaces = max_namespaces
        self._generations: OrderedDict[Namespace, list[SuffixIndex]] = OrderedDict()

    def add(self, namespace: Namespace, tokens: TokenArray) -> None:
        """Add the tokens of a sequence (of a very long one, its end)."""
        if len(tokens) <= NGRAM:
            return
        generations = self._generations.setdefault(namespace, [SuffixIndex()])
        self._generations.move_to_end(namespace)
        kept = tokens[-min(self._max_tokens, _LONGEST_ADDED) :]
        if len(generations[0]) + len(kept) > self._max_tokens and len(generations[0]):
            generations.insert(0, SuffixIndex())
            del generations[2:]
        generations[0].start_sequence()
        generations[0].extend(kept.tolist())
        while len(self._generations) > 1 and (
            len(self._generations) > self._max_namespaces or self._num_tokens() > self._max_total_tokens
        ):
            self._generations.popitem(last=False)

    def _num_tokens(self) -> int:
        return sum(len(index) for generations in self._generations.values() for index in generations)

    def propose(
        self, namespace: Namespace, suffix: Sequence[int], max_tokens: int
    ) -> tuple[tuple[int, ...], int]:
        """Return what followed the longest tail of `suffix` in this namespace, and the tail's length."""
        best: tuple[tuple[int, ...], int] = ((), 0)
        for index in self._generations.get(namespace, ()):
            found = index.find(suffix)
            if found is not None and found.length > best[1]:
                token_ids = index.continuation(found.position, max_tokens)
                if token_ids:
                    best = (token_ids, found.length)
        return best


def last_tokens(tokens: TokenArray) -> list[int]:
    """Return as many of the last tokens as a search looks at."""
    result: list[int] = tokens[-_LONGEST:].tolist()
    return result


def evidence_of(source: str, length: int) -> str:
    """Name the kind of evidence that `length` equal tokens are."""
    return f"{source}-{'long' if length >= 16 else 'medium' if length >= 6 else 'short'}"
