"""Finding markers such as ``<tool_call>`` in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def find_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return (position, marker) of the marker that begins first in `text`, or None."""
    found = [(position, marker) for marker in markers if (position := text.find(marker)) >= 0]
    return min(found, key=lambda item: (item[0], -len(item[1])), default=None)


def num_to_hold(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may be the beginning of a marker."""
    longest = min(len(text), max((len(marker) for marker in markers), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class MarkedText:
    """Text before a marker is returned as soon as it can't be part of one."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
        """Return (text before the marker, the marker or None, text after it).

        Without a marker, the end of the text that may become one is held back until the next call.
        """
        text = self._held + text
        self._held = ""
        found = find_marker(text, markers)
        if found is not None:
            position, marker = found
            return text[:position], marker, text[position + len(marker) :]
        hold = num_to_hold(text, markers)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], None, ""

    def drain(self) -> str:
        """Return what is held back; afterwards nothing is."""
        text, self._held = self._held, ""
        return text
