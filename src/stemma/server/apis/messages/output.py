"""From the parts of an answer to Anthropic's content blocks, and to the events that tell of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from stemma.server.answers.events import CallArguments, CallStart, Content, Event, Reasoning
from stemma.server.turn.call_arguments import ControlEscapes, call_arguments

StreamEvent = dict[str, Any]


class ContentBlocks:
    """Folds the events of one answer into blocks; the same code for streams and whole answers."""

    def __init__(self, *, with_thinking: bool) -> None:
        self._with_thinking = with_thinking
        self._kind: type[Event] | None = None
        """The kind of the open block; None: no block is open."""
        self._pieces: list[str] = []
        self._escapes = ControlEscapes()
        """Of the open call: clients' parsers end a stream at a raw newline."""
        self.blocks: list[dict[str, Any]] = []
        self.has_calls = False

    def feed(self, events: Iterable[Event]) -> list[StreamEvent]:
        """Take the next parts; return what a stream tells of them."""
        told: list[StreamEvent] = []
        for event in events:
            match event:
                case Reasoning(text):
                    if self._with_thinking:
                        self._open(told, Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
                        self._delta(told, text, {"type": "thinking_delta", "thinking": text})
                case Content(text):
                    self._open(told, Content, {"type": "text", "text": ""})
                    self._delta(told, text, {"type": "text_delta", "text": text})
                case CallStart(_, name):
                    self.has_calls = True
                    self._close(told)
                    call_id = f"toolu_{secrets.token_hex(12)}"
                    block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                    self._open(told, CallStart, block)
                    self._escapes = ControlEscapes()
                case CallArguments(_, text):
                    escaped = self._escapes.feed(text)
                    self._delta(told, escaped, {"type": "input_json_delta", "partial_json": escaped})
        return told

    def end(self) -> list[StreamEvent]:
        """The answer is over."""
        told: list[StreamEvent] = []
        self._close(told)
        return told

    def _open(self, told: list[StreamEvent], kind: type[Event], block: dict[str, Any]) -> None:
        if self._kind is kind:
            return
        self._close(told)
        self._kind, self._pieces = kind, []
        self.blocks.append(block)
        told.append({"type": "content_block_start", **self._place, "content_block": dict(block)})

    def _delta(self, told: list[StreamEvent], text: str, delta: dict[str, Any]) -> None:
        self._pieces.append(text)
        told.append({"type": "content_block_delta", **self._place, "delta": delta})

    def _close(self, told: list[StreamEvent]) -> None:
        if self._kind is None:
            return
        block, text = self.blocks[-1], "".join(self._pieces)
        if self._kind is CallStart:
            block["input"] = call_arguments(text)
        else:
            block["thinking" if self._kind is Reasoning else "text"] = text
        told.append({"type": "content_block_stop", **self._place})
        self._kind = None

    @property
    def _place(self) -> dict[str, int]:
        return {"index": len(self.blocks) - 1}
