"""Reading answers in tests: whole, and cut into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from stemma.server.answers.chat import AnswerReader, ToolUse
from stemma.server.answers.events import Answer, Event, fold, parse
from stemma.server.answers.families import AnswerFormat
from stemma.server.answers.formats.registry import TOOL_FORMATS
from stemma.server.answers.formats.thinking import THINKING_FORMATS

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "part": {"type": "number"},
        "sure": {"type": "boolean"},
        "list": {"type": "array"},
        "map": {"type": "object"},
    },
}
TOOLS: Mapping[str, Mapping[str, Any]] = {"get_weather": SCHEMA, "add": {"type": "object"}}


def reader(
    tools: str | None,
    thinking: str | None = None,
    *,
    opened: bool = False,
    mode: Literal["off", "auto", "required", "named"] = "auto",
    parallel: bool = True,
    schemas: Mapping[str, Mapping[str, Any]] = TOOLS,
) -> AnswerReader:
    """Return the reader of one request."""
    form = AnswerFormat(
        None if tools is None else TOOL_FORMATS[tools],
        None if thinking is None else THINKING_FORMATS[thinking],
    )
    return AnswerReader(form, ToolUse(schemas, mode, parallel=parallel), opened)


def read(text: str, tools: str | None, thinking: str | None = None, **options: Any) -> Answer:
    """Return the answer that `text` is, which must be the same if each character comes alone."""
    made = reader(tools, thinking, **options)
    answer = parse(made.parser(), text)
    assert joined(pieces_read(made, text)) == joined(pieces_read(made, [text]))
    return answer


def pieces_read(made: AnswerReader, pieces: Iterable[str]) -> list[Event]:
    """Return all events of `pieces`."""
    parser = made.parser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.end()]


def joined(events: list[Event]) -> list[tuple[str, Answer]]:
    """Return the runs of events of a kind, each as the answer that it is: what doesn't depend on cuts."""
    runs = itertools.groupby(events, lambda event: (type(event).__name__, getattr(event, "index", None)))
    return [
        (kind, fold(list(run)) if kind in ("Content", "Reasoning") else Answer(str(index) + repr_of(run)))
        for (kind, index), run in runs
    ]


def repr_of(run: Iterable[Any]) -> str:
    """Return names and text of the events of one call."""
    return "".join(getattr(event, "text", "") or f"{event.name}/{event.call_id}" for event in run)


def cut(text: str, cuts: Iterable[int]) -> list[str]:
    """Return `text` in pieces."""
    bounds = [0, *sorted({one for one in cuts if 0 < one < len(text)}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]
