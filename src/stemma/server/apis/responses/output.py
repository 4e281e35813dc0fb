"""From the parts of an answer to the items of a response, and to the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from stemma.server.answers.chat import new_call_id
from stemma.server.answers.events import CallArguments, CallStart, Content, Event, Reasoning
from stemma.server.answers.formats.format import ToolFormat
from stemma.server.apis.responses.calls import OpenCall
from stemma.server.apis.responses.tools import Offered, OfferedTool

StreamEvent = dict[str, Any]
"""One event of the stream, still without its `sequence_number`."""


def new_id(prefix: str) -> str:
    """Return a fresh id as OpenAI writes them, e.g. ``resp_4f1c...``."""
    return f"{prefix}_{uuid.uuid4().hex}"


class OutputItems:
    """Folds the events of one answer into output items; the same code for streams and whole answers."""

    def __init__(
        self, tools: ToolFormat | None, offered: Offered | None = None, forced: OfferedTool | None = None
    ) -> None:
        """`offered`: the request's tools. `forced`: the one whose plain text the answer is."""
        self._tools = tools
        self._offered = offered or {}
        self._forced = forced
        self._kind: type[Event] | None = None
        """The kind of the open item; None: no item is open."""
        self._call: OpenCall = OpenCall(None, "")
        """What is known of the open item, if it is a call."""
        self._pieces: list[str] = []
        self.items: list[dict[str, Any]] = []

    def feed(self, events: Iterable[Event]) -> list[StreamEvent]:
        """Take the next parts; return what a stream tells of them."""
        told: list[StreamEvent] = []
        for event in events:
            match event:
                case Reasoning(text):
                    self._text(told, Reasoning, text)
                case Content(text) if self._forced is not None:
                    self._forced_text(told, self._forced, text)
                case Content(text):
                    self._text(told, Content, text)
                case CallStart(_, name):
                    self._close(told, "completed")
                    self._open_call(told, OpenCall(self._offered.get(name), name))
                case CallArguments(_, text):
                    self._tell_call(told, self._call.feed(text))
        return told

    def end(self, status: str) -> list[StreamEvent]:
        """The answer is over; its last item gets `status`."""
        told: list[StreamEvent] = []
        self._close(told, status)
        return told

    @property
    def reasoning(self) -> str:
        """All reasoning so far whose item is closed."""
        items = [item for item in self.items if item["type"] == "reasoning"]
        return "".join(part["text"] for item in items for part in item["content"])

    def _text(self, told: list[StreamEvent], kind: type[Event], text: str) -> None:
        if self._kind is not kind:
            self._close(told, "completed")
            self._kind = kind
            if kind is Reasoning:
                item = {"type": "reasoning", "id": new_id("rs"), "summary": []}
            else:
                item = {"type": "message", "id": new_id("msg"), "role": "assistant"}
            self._add(told, {**item, "status": "in_progress", "content": []})
            told.append(self._event("response.content_part.added", content_index=0, part=self._part("")))
        self._pieces.append(text)
        name = "response.reasoning_text.delta" if kind is Reasoning else "response.output_text.delta"
        told.append(self._event(name, content_index=0, delta=text, **self._logprobs()))

    def _forced_text(self, told: list[StreamEvent], tool: OfferedTool, text: str) -> None:
        if self._kind is not CallStart:
            self._close(told, "completed")
            self._open_call(told, OpenCall(tool, tool.name, is_plain=True))
        self._tell_call(told, self._call.feed(text))

    def _open_call(self, told: list[StreamEvent], call: OpenCall) -> None:
        self._kind, self._call = CallStart, call
        item = {"type": call.item_type, "id": new_id(call.id_prefix), "call_id": new_call_id(self._tools)}
        self._add(told, {**item, **call.names, **call.content(""), "status": "in_progress"})

    def _tell_call(self, told: list[StreamEvent], text: str) -> None:
        if not text:
            return
        self._pieces.append(text)
        if self._call.told_as is not None:
            told.append(self._event(f"response.{self._call.told_as}.delta", delta=text))

    def _add(self, told: list[StreamEvent], item: dict[str, Any]) -> None:
        self.items.append(item)
        self._pieces = []
        place = {"output_index": len(self.items) - 1}
        told.append({"type": "response.output_item.added", **place, "item": dict(item)})

    def _close(self, told: list[StreamEvent], status: str) -> None:
        if self._kind is None:
            return
        if self._kind is CallStart:
            self._tell_call(told, self._call.end())
        item, text = self.items[-1], "".join(self._pieces)
        item["status"] = status
        if self._kind is CallStart:
            item |= (content := self._call.content(text))
            if self._call.told_as is not None:
                told.append(self._event(f"response.{self._call.told_as}.done", **self._call.names, **content))
        else:
            part = self._part(text)
            item["content"] = [part]
            name = "reasoning_text" if self._kind is Reasoning else "output_text"
            done = {"text": text, **self._logprobs()}
            told.append(self._event(f"response.{name}.done", content_index=0, **done))
            told.append(self._event("response.content_part.done", content_index=0, part=part))
        place = {"output_index": len(self.items) - 1}
        told.append({"type": "response.output_item.done", **place, "item": dict(item)})
        self._kind = None

    def _logprobs(self) -> dict[str, list[Any]]:
        """Return the list that OpenAI's events of text have and those of reasoning don't."""
        return {} if self._kind is Reasoning else {"logprobs": []}

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": kind, **place, **fields}
