"""The token ids of answers, by the rendered history that led to them: bounded, and safe in several threads.

An answer is looked for by what was rendered before it, not by messages. So any text that begins as an earlier
prompt did finds what was generated there, whichever API and template it comes from. An answer's text isn't
kept: it is what its ids decode to, so whatever a damaged record says, ids and text agree.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from stemma.model.text.tokenizer import Tokenizer
from stemma.server.history.token_texts import HeadTexts
from stemma.types import TokenArray

TAIL_CHARS = 8
"""Characters before an answer that are compared before a long text is hashed up to it."""
CONTEXT_TOKENS = 4
MAX_AT_A_PLACE = 128
"""Answers kept for one history; beyond them the first written is dropped."""
_ENTRY_BYTES = 800
"""The objects around one answer, generously."""


def scope_of(tenant: str, salt: str, adapter: str) -> bytes:
    """Return the name, 32 bytes, of what shares answers: those who share cached blocks."""
    digest = hashlib.sha256()
    for text in (tenant, salt, adapter):
        data = _utf8(text)
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer begins."""

    scope: bytes
    """The scope, made by `scope_of`."""
    key: bytes
    """SHA-256 of the scope and the rendered text before the answer."""
    num_chars: int
    """Length of that text."""
    tail: str
    """Its last characters, `TAIL_CHARS` at most."""

    @classmethod
    def after(cls, scope: bytes, text: str) -> Place:
        """Return the place behind a rendered text."""
        digest = hashlib.sha256(scope)
        digest.update(_utf8(text))
        return cls(scope, digest.digest(), len(text), text[-TAIL_CHARS:])


@dataclass(frozen=True, slots=True, eq=False)
class WrittenAnswer:
    """The tokens that a model wrote at a place."""

    place: Place
    context: TokenArray
    """The last ids before it, int32, `CONTEXT_TOKENS` at most."""
    token_ids: TokenArray
    """int32; without the token that ended it."""

    @property
    def name(self) -> bytes:
        """Return what tells it from all others, 16 bytes."""
        data = self.token_ids.astype("<i4").tobytes()
        return hashlib.blake2b(self.place.key + data, digest_size=16).digest()


@dataclass(frozen=True, slots=True, eq=False)
class AnswerMatch:
    """An answer that a text brings back, or the head of it that the text has."""

    begin: int
    end: int
    """Characters of the text from which and to which the ids stand."""
    token_ids: TokenArray
    is_whole: bool
    """The text has all of it."""
    num_thinking_tokens: int = 0
    """Tokens of thinking in the answer, if its thinking is where the text parts from it."""


@dataclass(slots=True, eq=False)
class _Kept:
    answer: WrittenAnswer
    used_at: float
    """Seconds since 1970, since it outlives the process."""
    text: str | None = None
    """Decoded at its first use."""

    @property
    def num_bytes(self) -> int:
        text = 0 if self.text is None else sys.getsizeof(self.text)
        return _ENTRY_BYTES + self.answer.token_ids.nbytes + self.answer.context.nbytes + text


@dataclass(slots=True)
class _Scope:
    """Where answers of one scope begin: tails by length of the text before, counted."""

    places: dict[int, dict[str, int]] = field(default_factory=dict)

    def add(self, place: Place) -> None:
        tails = self.places.setdefault(place.num_chars, {})
        tails[place.tail] = tails.get(place.tail, 0) + 1

    def remove(self, place: Place) -> None:
        tails = self.places[place.num_chars]
        tails[place.tail] -= 1
        if not tails[place.tail]:
            del tails[place.tail]
        if not tails:
            del self.places[place.num_chars]


class WrittenAnswers:
    """The answers used last, as far as `max_bytes` reach, ids and texts counted. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_bytes: int,
        thinking_end: str = "</think>",
        *,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`thinking_end`: what models write behind their thinking.

        `ttl_s`: answers that weren't used for so long are dropped.
        """
        self._ttl_s = ttl_s
        self._clock = clock
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._thinking_end = thinking_end
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        """By name, the one used least lately first."""
        self._at: dict[bytes, list[_Kept]] = {}
        """By the key of their place, in the order in which they were written."""
        self._scopes: dict[bytes, _Scope] = {}
        self._lock = threading.Lock()
        self.on_kept: Callable[[WrittenAnswer], None] = lambda answer: None
        """Learns of each answer that is new; must not wait."""
        self.num_bytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def answers(self) -> list[tuple[WrittenAnswer, float]]:
        """Return all, the one used least lately first, each with the time of its last use."""
        with self._lock:
            return [(kept.answer, kept.used_at) for kept in self._kept.values()]

    def expire(self) -> int:
        """Drop what wasn't used for `ttl_s`; return how many."""
        if self._ttl_s is None:
            return 0
        number, since = 0, self._clock() - self._ttl_s
        with self._lock:
            while self._kept and (oldest := next(iter(self._kept.values()))).used_at < since:
                self._drop(oldest.answer.name)
                number += 1
        return number

    def keep(self, answer: WrittenAnswer, used_at: float | None = None) -> None:
        """Keep an answer. One that is known stays as it is, so that prompts which hold it do, too.

        `used_at`: None: now.
        """
        if not len(answer.token_ids):
            return
        name, used_at = answer.name, self._clock() if used_at is None else used_at
        with self._lock:
            if name in self._kept:
                self._kept[name].used_at = max(used_at, self._kept[name].used_at)
                self._kept.move_to_end(name)
                return
            kept = _Kept(answer, used_at)
            if kept.num_bytes > self._max_bytes // 2:
                return
            here = self._at.setdefault(answer.place.key, [])
            if len(here) >= MAX_AT_A_PLACE:
                self._drop(here[0].answer.name)
                here = self._at.setdefault(answer.place.key, [])
            here.append(kept)
            self._kept[name] = kept
            self._scopes.setdefault(answer.place.scope, _Scope()).add(answer.place)
            self.num_bytes += kept.num_bytes
            self._make_room()
            self.on_kept(answer)  # under the lock, so that what `clear` drops was told before

    def clear(self) -> int:
        """Drop all answers; return how many."""
        with self._lock:
            number = len(self._kept)
            self._kept.clear()
            self._at.clear()
            self._scopes.clear()
            self.num_bytes = 0
        return number

    def find(self, scope: bytes, text: str) -> list[AnswerMatch]:
        """Return what `text`, a rendered conversation, brings back of what was written in `scope`, in order.

        Of several answers at one place that which agrees longest; of equal ones the first written.
        """
        self.expire()
        found: list[AnswerMatch] = []
        end = 0
        for begin, key in self._keys(scope, text):
            with self._lock:
                here = list(self._at.get(key, ()))
            if begin < end or not here:
                continue
            match, kept = self._best(here, text, begin)
            found.append(match)
            end = match.end
            if len(match.token_ids):
                self._touch(kept)
        return found

    def _keys(self, scope: bytes, text: str) -> Iterator[tuple[int, bytes]]:
        """Yield (characters before it, key) of each place in `text` where an answer may have begun."""
        with self._lock:
            known = self._scopes.get(scope)
            places = () if known is None else known.places.items()
            lengths = [
                length
                for length, tails in places
                if length <= len(text) and text[max(0, length - TAIL_CHARS) : length] in tails
            ]
        digest = hashlib.sha256(scope)
        for before, length in pairwise([0, *sorted(lengths)]):
            digest.update(_utf8(text[before:length]))
            yield length, digest.copy().digest()

    def _best(self, here: list[_Kept], text: str, begin: int) -> tuple[AnswerMatch, _Kept]:
        """Return the match with the answer that agrees longest with `text` from `begin` on."""
        texts = [self._text_of(kept) for kept in here]
        whole = [number for number, one in enumerate(texts) if one and text.startswith(one, begin)]
        if whole:
            best = max(whole, key=lambda number: len(texts[number]))
            match = AnswerMatch(begin, begin + len(texts[best]), here[best].answer.token_ids, is_whole=True)
            return match, here[best]
        agreed = [_num_common(one, text, begin) for one in texts]
        best = max(range(len(here)), key=lambda number: agreed[number])
        answer = here[best].answer
        heads = HeadTexts(self._tokenizer, answer.token_ids, answer.context)
        number = heads.num_whole_words(text, begin)
        behind = texts[best].find(self._thinking_end) + len(self._thinking_end)
        thinks = self._thinking_end in texts[best] and agreed[best] < behind
        match = AnswerMatch(
            begin,
            begin + len(heads.head(number)),
            answer.token_ids[:number],
            is_whole=False,
            num_thinking_tokens=heads.num_to_reach(behind) if thinks else 0,
        )
        return match, here[best]

    def _text_of(self, kept: _Kept) -> str:
        """Return an answer's text; empty where its ids have none by themselves."""
        if kept.text is None:
            answer = kept.answer
            text = HeadTexts(self._tokenizer, answer.token_ids, answer.context).head(len(answer.token_ids))
            with self._lock:
                before, kept.text = kept.num_bytes, text
                if self._kept.get(answer.name) is kept:
                    self.num_bytes += kept.num_bytes - before
                    self._make_room()
            return text
        return kept.text

    def _touch(self, kept: _Kept) -> None:
        with self._lock:
            name = kept.answer.name
            if name in self._kept:
                self._kept[name].used_at = self._clock()
                self._kept.move_to_end(name)

    def _make_room(self) -> None:
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, name: bytes) -> None:
        kept = self._kept.pop(name)
        place = kept.answer.place
        self.num_bytes -= kept.num_bytes
        self.num_evicted += 1
        here = self._at[place.key]
        here.remove(kept)
        if not here:
            del self._at[place.key]
        scope = self._scopes[place.scope]
        scope.remove(place)
        if not scope.places:
            del self._scopes[place.scope]


def _num_common(answer: str, text: str, begin: int) -> int:
    """Return how many leading characters of `answer` are those of `text` from `begin` on; by halving."""
    low, high = 0, min(len(answer), len(text) - begin)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(answer[:middle], begin):
            low = middle
        else:
            high = middle - 1
    return low


def _utf8(text: str) -> bytes:
    """Return a text's bytes; JSON may hold half of a character, which plain UTF-8 has no bytes for."""
    return text.encode("utf-8", "surrogatepass")
