"""The parts of an answer, as a stream of events, and the answer that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote while it was thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The name of tool call number `index` is known."""

    index: int
    name: str
    call_id: str = ""
    """What the model itself calls it; empty where its format has no names for calls."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of the arguments of tool call number `index`."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class AnswerParser(Protocol):
    """Reads one answer. The events depend on the whole text only, not on how it was cut into pieces."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text`, the next piece of the answer, makes certain."""
        ...

    def end(self) -> list[Event]:
        """Return the events of text that was held back; the answer is complete."""
        ...


@dataclass(slots=True)
class ToolCall:
    """One call; `arguments` is JSON text."""

    name: str
    arguments: str = ""
    call_id: str = ""


@dataclass(slots=True)
class Answer:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def fold(events: Iterable[Event]) -> Answer:
    """Return the answer that `events` describe."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[CallStart, list[str]]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart():
                calls.append((event, []))
            case CallArguments(index, text):
                calls[index][1].append(text)
    told = [ToolCall(start.name, "".join(pieces), start.call_id) for start, pieces in calls]
    return Answer("".join(content), "".join(reasoning), told)


def parse(parser: AnswerParser, text: str) -> Answer:
    """Return the whole answer whose text is `text`."""
    return fold([*parser.feed(text), *parser.end()])
