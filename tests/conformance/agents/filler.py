"""Text of our own in place of others': as long, and parting from other texts where theirs did.

A text is a place in a tree: it shares so many characters with an earlier one and then has so many of its own.
What stands there are words from a list of ours, chosen by the text's number. So the number of characters is
kept, and that of tokens about; two texts share a prefix as long as theirs did.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from functools import cache

WORDS = (  # noqa: SIM905
    "amber anchor apple april arch ash autumn bark barley basin beach bell birch blue boat bread bridge "
    "brook brown candle castle cedar chalk cherry clay cliff cloud clover coast copper corn creek crow "
    "dawn deer delta dew dune dusk eagle east elm ember fern field finch fir flint fog forest fox frost "
    "garden gate glade glass gold grain grass grove gull harbor hawk hazel heath heron hill honey horn "
    "ice iris island ivy jade lake lamp larch lark leaf lily lime linden lodge maple marsh meadow mill "
    "mint mist moon moss mound north oak oat ocean olive orchard otter owl path peach pear pebble pine "
    "plain plum pond poplar quartz quiet rain raven reed ridge river road robin rock root rose rust rye "
    "sage salt sand sea seed shade shore silver sky slate slope snow south spring spruce star stone "
    "storm straw stream summer sun swan thorn tide timber trail trout valley vine violet wave west "
    "wheat willow wind winter wood wren yard "
).split()


def filler(number: int, length: int, glue: str = " ") -> str:
    """Return `length` characters of words, chosen by `number`."""
    words: list[str] = []
    size, counter = 0, 0
    while size < length:
        for byte in hashlib.blake2b(f"{number}.{counter}".encode()).digest():
            words.append(WORDS[byte % len(WORDS)])
            size += len(words[-1]) + len(glue)
        counter += 1
    return glue.join(words)[:length].ljust(length, "x")


class Texts:
    """Takes others' texts in; keeps of each the earlier one that it begins like, how far, and its length."""

    def __init__(self) -> None:
        self.table: list[tuple[int, int, int]] = []
        self._numbers: dict[str, int] = {}
        self._sorted: list[str] = []

    def add(self, text: str) -> int:
        """Return a text's number in the table; the same for an equal one."""
        if text in self._numbers:
            return self._numbers[text]
        place = bisect_left(self._sorted, text)
        near = self._sorted[max(0, place - 1) : place + 1]
        shared, nearest = max(((_shared(text, one), one) for one in near), default=(0, ""))
        parent = self._numbers[nearest] if shared else -1
        self._numbers[text] = len(self.table)
        self._sorted.insert(place, text)
        self.table.append((parent, shared, len(text)))
        return self._numbers[text]


def _shared(left: str, right: str) -> int:
    length = min(len(left), len(right))
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low


def expand(table: list[list[int]]) -> list[str]:
    """Return the texts of a table."""

    @cache
    def text(number: int) -> str:
        parent, shared, length = table[number]
        head = text(parent)[:shared] if shared else ""
        return head + filler(number, length - shared)

    return [text(number) for number in range(len(table))]


def as_json_text(value: object, *, is_spaced: bool) -> str:
    """Return JSON as clients write it."""
    return json.dumps(value, ensure_ascii=False, separators=None if is_spaced else (",", ":"))
