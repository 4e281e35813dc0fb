"""The plain text in the arguments of a call, as it comes: ``{"input": "..."}`` without the JSON around it."""

from __future__ import annotations

import json
import re

from stemma.server.apis.responses.tools import INPUT
from stemma.server.turn.call_arguments import call_arguments

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_WHOLE = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+', re.DOTALL)
"""Characters and escapes of a string that are complete."""
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
"""The first half of a character at the end: the other one may follow."""
_ESCAPE_CHARS = 6


class PlainInput:
    """Reads one call's arguments in pieces. The text doesn't depend on how they were cut."""

    def __init__(self) -> None:
        self._held = ""
        self._is_open = False
        """Whether the text has begun."""
        self._is_over = False

    def feed(self, piece: str) -> str:
        """Return the text that is known with `piece`."""
        if self._is_over:
            return ""
        self._held += piece
        if not self._is_open:
            begun = _HEAD.match(self._held)
            if begun is None:
                return ""
            self._is_open, self._held = True, self._held[begun.end() :]
        return self._take()

    def end(self) -> str:
        """Return the text that was held back. Arguments that are no such object are the text themselves."""
        if self._is_open or not self._held:
            return ""
        text = call_arguments(self._held).get(INPUT)
        return text if isinstance(text, str) else self._held

    def _take(self) -> str:
        found = ""
        while self._held:
            whole = _WHOLE.match(self._held)
            run = "" if whole is None else whole.group()
            rest = self._held[len(run) :]
            is_cut = len(rest) < _ESCAPE_CHARS and not rest.startswith('"')
            if is_cut and (half := _HALF.search(run)) is not None:
                run, rest = run[: half.start()], half.group() + rest
            found, self._held = found + _text(run), rest
            if rest.startswith('"'):
                self._held, self._is_over = "", True
            elif len(rest) >= _ESCAPE_CHARS and not _WHOLE.match(rest).group():  # type: ignore[union-attr]
                found, self._held = found + rest[:2], rest[2:]  # an escape that is none
                continue
            break
        return found


def _text(run: str) -> str:
    try:
        decoded = str(json.loads(f'"{run}"', strict=False))
    except ValueError:
        decoded = run
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
