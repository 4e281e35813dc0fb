"""Where readings put what they find: the events of one answer, with the gaps around calls left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from stemma.server.answers.events import CallArguments, CallStart, Content, Event, Reasoning
from stemma.server.answers.scanning import Reading, Scanner


class Parts:
    """The events of one answer, in order.

    Line breaks before a call and white space between calls are the format's, not the answer's. All other
    white space is content.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        """`max_calls`: further calls are left out."""
        self._max_calls = max_calls
        self._events: list[Event] = []
        self._space: list[str] = []
        """White space that is content only if more text follows it, or no call."""
        self._has_text = False
        self._after_call = False
        self.num_calls = 0

    def content(self, text: str) -> None:
        """Take text for the user."""
        body = text.rstrip()
        if body:
            before = "".join(self._space)
            if self._after_call and not self._has_text:
                before, body = "", (before + body).lstrip()
            self._put_content(before + body)
            self._after_call = False
            self._space = []
        if len(body) < len(text):
            self._space.append(text[len(text.rstrip()) :] if body else text)

    def plain(self, text: str) -> None:
        """Take text of an answer that can't hold calls."""
        self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Take text of the model's thinking."""
        self._events.append(Reasoning(text))

    def call(self, name: str, call_id: str = "") -> None:
        """Begin the next call. `call_id`: what the model itself calls it."""
        if self._has_text and not self._after_call and (kept := "".join(self._space).rstrip("\n")):
            self._put_content(kept)
        if not self._after_call:
            self._space = []
        self._after_call = True
        self.num_calls += 1
        if self._is_wanted:
            self._events.append(CallStart(self.num_calls - 1, name, call_id))

    def arguments(self, text: str) -> None:
        """Take the next piece of the JSON text of the last call's arguments."""
        if text and self._is_wanted:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """The answer is over."""
        if self._space and not self._after_call:
            self._put_content("".join(self._space))
        self._space = []

    def take(self) -> list[Event]:
        """Return the events since the last time; neighbours of a kind are one."""
        events, self._events = self._events, []
        return events if len(events) < 2 else _joined(events)

    def _put_content(self, text: str) -> None:
        self._has_text = True
        self._events.append(Content(text))

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls


def _joined(events: list[Event]) -> list[Event]:
    joined: list[Event] = []
    for kind, group in groupby(events, type):
        run = list(group)
        if kind is CallStart or len(run) == 1:
            joined += run
        else:
            joined.append(replace(run[0], text="".join(event.text for event in run)))  # type: ignore
    return joined


class ReadingParser:
    """An `AnswerParser` that runs a reading."""

    def __init__(self, read: Callable[[Scanner, Parts], Reading[None]], max_calls: int | None = None) -> None:
        self._scanner = Scanner()
        self._parts = Parts(max_calls)
        self._reading = self._run(read)

    def feed(self, text: str) -> list[Event]:
        """Return the events of `text`."""
        if text:
            self._scanner.add(text)
            next(self._reading, None)
        return self._parts.take()

    def end(self) -> list[Event]:
        """Return the events of what was held back."""
        self._scanner.ended = True
        next(self._reading, None)
        self._parts.end()
        return self._parts.take()

    def _run(self, read: Callable[[Scanner, Parts], Reading[None]]) -> Reading[None]:
        yield from read(self._scanner, self._parts)
        yield from self._scanner.all(self._parts.content)
