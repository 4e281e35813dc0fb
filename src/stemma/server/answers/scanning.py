"""Reading an answer that arrives in pieces, as if it were whole.

A `Reading` is a generator that yields where it needs more text. Formats are written as straight code over the
primitives of a `Scanner`, each of which holds back no more text than its longest marker has. So the time is
linear in the text, and what is read doesn't depend on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Tell = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class Markers:
    """Texts that end a passage. None may begin with another: the shorter one would depend on the cut."""

    def __init__(self, *markers: str) -> None:
        self._pattern = re.compile("|".join(re.escape(marker) for marker in markers))
        self._heads = frozenset(marker[:end] for marker in markers for end in range(1, len(marker)))
        """What may become a marker."""
        self._longest = max(len(head) for head in self._heads) if self._heads else 0
        self._first = "".join({marker[0] for marker in markers})

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """Return (position, marker) of the first marker in `text` from `start` on, or None."""
        found = self._pattern.search(text, start)
        return None if found is None else (found.start(), found.group())

    def num_to_hold(self, text: str, start: int) -> int:
        """Return the length of the longest end of `text`, from `start` on, that may become a marker."""
        first = max(start, len(text) - self._longest)
        tail = text[first:]
        if not any(char in tail for char in self._first):
            return 0
        return next((len(tail) - i for i in range(len(tail)) if tail[i:] in self._heads), 0)


class Scanner:
    """The text of one answer, up to what has arrived."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._record: list[str] | None = None
        self.ended = False
        """Whether all of the answer has arrived."""

    @property
    def is_over(self) -> bool:
        """Whether nothing follows."""
        return self.ended and self._at >= len(self._text)

    def record(self) -> None:
        """Remember what is passed from here on, or from where that began."""
        if self._record is None:
            self._record = []

    def recorded(self) -> str:
        """Return what was passed since `record`, and remember no longer."""
        text, self._record = "".join(self._record or ()), None
        return text

    def add(self, text: str) -> None:
        """Take the next piece."""
        self._text = self._text[self._at :] + text if self._at < len(self._text) else text
        self._at = 0

    def until(self, markers: Markers, tell: Tell) -> Reading[str | None]:
        """Tell the text before the next marker as it comes; pass the marker and return it. None: the end."""
        while True:
            found = markers.find(self._text, self._at)
            end = found[0] if found is not None else len(self._text) - self._num_to_hold(markers)
            if end > self._at:
                tell(self._pass(end))
            if found is not None:
                return self._pass(self._at + len(found[1]))
            if self.ended:
                return None
            yield

    def take(self, markers: Markers) -> Reading[tuple[str, str | None]]:
        """Return the text before the next marker, and the marker, which is passed. None: the end."""
        pieces: list[str] = []
        marker = yield from self.until(markers, pieces.append)
        return "".join(pieces), marker

    def run(self, pattern: re.Pattern[str], tell: Tell) -> Reading[None]:
        """Tell all characters from here on that `pattern`, a class of characters and a star, matches."""
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None and found.end() > self._at:
                tell(self._pass(found.end()))
            if self.ended or self._at < len(self._text):
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Return what `run` tells."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def space(self) -> Reading[str]:
        """Pass white space and return it."""
        return (yield from self.word(_SPACE))

    def accept(self, *options: str) -> Reading[str]:
        """Pass the first of `options` that the text goes on with and return it; empty if none does."""
        while True:
            rest = len(self._text) - self._at
            for option in options:
                if self._text.startswith(option, self._at):
                    return self._pass(self._at + len(option))
                if rest < len(option) and not self.ended and option.startswith(self._text[self._at :]):
                    break
            else:
                return ""
            yield

    def peek(self) -> Reading[str]:
        """Return the next character; empty at the end."""
        while self._at >= len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def chars(self, count: int) -> Reading[str]:
        """Pass `count` characters, fewer at the end, and return them."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._pass(min(len(self._text), self._at + count))

    def all(self, tell: Tell) -> Reading[None]:
        """Tell everything up to the end."""
        while True:
            if self._at < len(self._text):
                tell(self._pass(len(self._text)))
            if self.ended:
                return
            yield

    def back(self, marker: str) -> None:
        """Go back before `marker`, which was the last that was passed."""
        self._at -= len(marker)
        if self._record:
            self._record.pop()

    def _pass(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(text)
        return text

    def _num_to_hold(self, markers: Markers) -> int:
        return 0 if self.ended else markers.num_to_hold(self._text, self._at)
