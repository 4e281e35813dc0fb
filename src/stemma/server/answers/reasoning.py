"""Splitting ``<think>...</think>`` (Qwen3, DeepSeek-R1) from what follows it."""

from __future__ import annotations

from enum import Enum, auto

from stemma.server.answers.events import AnswerParser, Content, Event, Reasoning
from stemma.server.answers.markers import num_to_hold

OPEN, CLOSE = "<think>", "</think>"


def prompt_opens_reasoning(prompt_end: str) -> bool:
    """Return whether an answer begins inside the reasoning: DeepSeek-R1's template ends with ``<think>``."""
    return prompt_end.rstrip().endswith(OPEN)


class _Stage(Enum):
    START = auto()
    """Nothing but white space so far; a ``<think>`` may come."""
    THINKING = auto()
    GAP = auto()
    """After ``</think>``: newlines are dropped."""
    ANSWER = auto()


class ReasoningParser:
    """Reasoning at the beginning of an answer is split off; the rest goes to `inner`.

    `opened` says that the prompt ends inside the reasoning. Newlines beside the markers are dropped.
    """

    def __init__(self, inner: AnswerParser, *, opened: bool) -> None:
        self._inner = inner
        self._opened = opened
        self._stage = _Stage.START
        self._held = ""
        self._fresh = True
        """Whether no reasoning has come yet but newlines."""

    def feed(self, text: str) -> list[Event]:
        """Return the events of `text`."""
        events: list[Event] = []
        self._held += text
        if self._stage is _Stage.START:
            self._start()
        if self._stage is _Stage.THINKING:
            self._think(events)
        if self._stage is _Stage.GAP:
            self._held = self._held.lstrip("\n")
            if self._held:
                self._stage = _Stage.ANSWER
        if self._stage is _Stage.ANSWER and self._held:
            events.extend(self._inner.feed(self._held))
            self._held = ""
        return events

    def end(self) -> list[Event]:
        """Return the events of what was held back."""
        held, self._held = self._held, ""
        if not held:
            return self._inner.end()
        thinking = self._stage is _Stage.THINKING or (self._stage is _Stage.START and self._opened)
        events: list[Event] = [Reasoning(held)] if thinking else self._inner.feed(held)
        return [*events, *self._inner.end()]

    def _start(self) -> None:
        """Leave the first stage as soon as the text can't become ``<think>`` or is it."""
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._held = begun[len(OPEN) :]
            self._stage = _Stage.THINKING
        elif not OPEN.startswith(begun):
            self._stage = _Stage.THINKING if self._opened else _Stage.ANSWER

    def _think(self, events: list[Event]) -> None:
        if self._fresh:
            self._held = self._held.lstrip("\n")
            self._fresh = not self._held
        text, marker, rest = self._held.partition(CLOSE)
        if marker:
            self._stage, self._held = _Stage.GAP, rest
            text = text.rstrip("\n")
        else:
            # What may become the marker waits, and so do newlines before it: they are dropped if it comes.
            kept = text[: len(text) - num_to_hold(text, (CLOSE,))].rstrip("\n")
            self._held = text[len(kept) :]
            text = kept
        if text:
            events.append(Reasoning(text))


class PlainParser:
    """All text is content."""

    def feed(self, text: str) -> list[Event]:
        """Return `text` as content."""
        return [Content(text)] if text else []

    def end(self) -> list[Event]:
        """Nothing is ever held back."""
        return []
