"""How each model family writes its tool calls, and the parsers that read them back.

| name | the model writes |
|---|---|
| ``hermes`` | ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number (Qwen2.5, Qwen3) |
| ``llama3_json`` | the whole answer is ``{"name": ..., "parameters": {...}}``, several joined by ``;`` |
| ``mistral`` | ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` or ``[TOOL_CALLS]name[ARGS]{...}`` |
| ``deepseek`` | calls between DeepSeek's own tokens, as V3 (JSON in a code block) or V3.1 (bare JSON) |

Text that turns out to be no call is content. A call that ends in the middle keeps what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from stemma.server.answers.events import CallArguments, CallStart, Content, Event
from stemma.server.answers.json_text import CallObject, ValueEnd
from stemma.server.answers.markers import MarkedText


class _Calls:
    """Numbers the calls of one answer and turns objects into events."""

    def __init__(self, known: Collection[str] = ()) -> None:
        self._known = known
        """Names that a call may have; empty: any."""
        self._index = -1
        self._object: CallObject | None = None
        self._marker = ""
        self._started = False
        self.gave_up = False
        """Whether the last call turned out to be none; its text was returned as content."""

    def open(self, marker: str = "") -> None:
        """Begin the next call; `marker` stands before it and is content if it turns out to be no call."""
        self._object = CallObject()
        self._marker = marker
        self._started = False
        self.gave_up = False

    def feed(self, text: str, events: list[Event]) -> str | None:
        """Read `text` into the call; return what follows its end, or None while it is incomplete."""
        call = self._object
        assert call is not None
        rest = call.feed(text)
        if call.name is not None and not self._started:
            if self._known and call.name not in self._known:
                return self._give_up(call, rest, events)
            self._index += 1
            self._started = True
            events.append(CallStart(self._index, call.name))
        if self._started and (arguments := call.take_arguments()):
            events.append(CallArguments(self._index, arguments))
        if call.broken:
            return self._give_up(call, rest, events)
        return rest if call.complete else None

    def end(self, events: list[Event]) -> None:
        """The answer ended inside a call: without a name it was content."""
        call = self._object
        if call is not None and not self._started and (text := self._marker + call.raw):
            events.append(Content(text))

    def _give_up(self, call: CallObject, rest: str, events: list[Event]) -> str:
        if not self._started:
            events.append(Content(self._marker + call.raw))
            self.gave_up = True
        return rest


class HermesParser:
    """``<tool_call>{...}</tool_call>`` between text."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._marked = MarkedText()
        self._text = _Text()
        self._calls = _Calls()
        self._inside = False
        self._reading = False

    def feed(self, text: str) -> list[Event]:
        """Return the events of `text`."""
        events: list[Event] = []
        while text:
            if self._reading:
                rest = self._calls.feed(text, events)
                if rest is None:
                    return events
                self._reading, text = False, rest
                self._inside = not self._calls.gave_up
            elif self._inside:
                _, marker, text = self._marked.feed(text, (self.CLOSE,))
                self._inside = marker is None
            else:
                before, marker, text = self._marked.feed(text, (self.OPEN,))
                self._text.feed(before, events)
                if marker is not None:
                    self._text.drop_space()
                    self._inside = self._reading = True
                    self._calls.open(self.OPEN)
        return events

    def end(self) -> list[Event]:
        """Return the events of what was held back."""
        events: list[Event] = []
        if self._reading:
            self._calls.end(events)
        elif not self._inside:
            self._text.feed(self._marked.drain(), events)
            self._text.end(events)
        return events


class _Text:
    """Content around calls. White space is held back: it is dropped beside a call and kept within text."""

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def feed(self, text: str, events: list[Event]) -> None:
        """Take the next piece of content."""
        if not text:
            return
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body and self._after_call:
            body = body.lstrip()
            self._after_call = False
        if body:
            events.append(Content(body))

    def drop_space(self) -> None:
        """A call follows."""
        self._space, self._after_call = "", True

    def end(self, events: list[Event]) -> None:
        """The answer has ended: its last white space is content unless a call came before it."""
        if self._space and not self._after_call:
            events.append(Content(self._space))
        self._space = ""


class Llama3JsonParser:
    """An answer that is one object, or several joined by ``;``; an optional ``<|python_tag|>`` comes first.

    Since nothing marks a call, only the names of the request's tools make one.
    """

    TAG = "<|python_tag|>"

    def __init__(self, tool_names: Collection[str]) -> None:
        self._calls = _Calls(tool_names)
        self._held = ""
        self._is_text = False
        self._reading = False
        self._any = False

    def feed(self, text: str) -> list[Event]:
        """Return the events of `text`."""
        events: list[Event] = []
        self._held += text
        while self._held and not self._is_text:
            if self._reading:
                rest = self._calls.feed(self._held, events)
                self._held = rest or ""
                if rest is None:
                    return events
                self._reading = False
                self._is_text = self._calls.gave_up
                continue
            begun = self._held.lstrip(" \t\r\n;" if self._any else None)
            if begun.startswith(self.TAG) and not self._any:
                self._held = begun[len(self.TAG) :]
            elif begun.startswith("{"):
                self._held, self._reading, self._any = begun, True, True
                self._calls.open()
            elif not begun or (self.TAG.startswith(begun) and not self._any):
                return events
            else:
                self._is_text = True
        if self._is_text and self._held:
            events.append(Content(self._held))
            self._held = ""
        return events

    def end(self) -> list[Event]:
        """Return the events of what was held back."""
        events: list[Event] = []
        if self._reading:
            self._calls.end(events)
        elif self._held and not self._any:
            events.append(Content(self._held))
        return events


NameOf = Callable[[str], str]
"""Finds a tool's name in the text between the end of one call's arguments and the beginning of the next's."""


class _HeadedCalls:
    """Calls written as a head that holds the name, then the arguments as one JSON object."""

    def __init__(self, name_of: NameOf) -> None:
        self._name_of = name_of
        self._index = -1
        self._head = ""
        self._end: ValueEnd | None = None

    def feed(self, text: str, events: list[Event]) -> None:
        """Read `text`: heads up to a brace, then arguments up to the matching one."""
        start = 0
        for position, char in enumerate(text):
            if self._end is None:
                if char != "{":
                    self._head += char
                    continue
                self._index += 1
                events.append(CallStart(self._index, self._name_of(self._head)))
                self._head, self._end, start = "", ValueEnd(), position
            if self._end.feed(char):
                events.append(CallArguments(self._index, text[start : position + 1]))
                self._end, start = None, position + 1
        if self._end is not None and start < len(text):
            events.append(CallArguments(self._index, text[start:]))

    def unread(self) -> str:
        """Return the text if no call has come of it."""
        return self._head if self._index < 0 else ""


class _ListedCalls:
    """Calls as objects in a list, or one object."""

    def __init__(self) -> None:
        self._calls = _Calls()
        self._reading = False

    def feed(self, text: str, events: list[Event]) -> None:
        """Read `text`; what lies between objects has no meaning."""
        while text:
            if not self._reading:
                text = text[text.find("{") :] if "{" in text else ""
                if text:
                    self._calls.open()
                    self._reading = True
                continue
            rest = self._calls.feed(text, events)
            self._reading, text = rest is None, rest or ""

    def unread(self) -> str:
        """Return the text of an object that ended before it had a name."""
        events: list[Event] = []
        if self._reading:
            self._calls.end(events)
        return "".join(event.text for event in events if isinstance(event, Content))


class ForcedCallsParser:
    """The JSON list of calls that a grammar enforces for ``tool_choice: required``."""

    def __init__(self) -> None:
        self._calls = _ListedCalls()

    def feed(self, text: str) -> list[Event]:
        """Return the events of `text`."""
        events: list[Event] = []
        self._calls.feed(text, events)
        return events

    def end(self) -> list[Event]:
        """Return the events of what was held back."""
        unread = self._calls.unread()
        return [Content(unread)] if unread else []


class NamedCallParser:
    """The arguments of one call that a grammar enforces for a named ``tool_choice``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        """Return the events of `text`."""
        events: list[Event] = [CallArguments(0, text)] if text else []
        if events and not self._begun:
            self._begun = True
            events.insert(0, CallStart(0, self._name))
        return events

    def end(self) -> list[Event]:
        """Nothing is ever held back."""
        return []


class _TrailingCalls:
    """Text, then one marker, then nothing but calls."""

    def __init__(self, marker: str, name_of: NameOf, *, may_be_list: bool) -> None:
        self._marker = marker
        self._name_of = name_of
        self._may_be_list = may_be_list
        self._marked = MarkedText()
        self._text = _Text()
        self._calls: _HeadedCalls | _ListedCalls | None = None
        self._inside = False

    def feed(self, text: str) -> list[Event]:
        """Return the events of `text`."""
        events: list[Event] = []
        if not self._inside:
            before, marker, text = self._marked.feed(text, (self._marker,))
            self._text.feed(before, events)
            if marker is None:
                return events
            self._text.drop_space()
            self._inside = True
        if self._calls is None and (text := text.lstrip()):
            listed = self._may_be_list and text[0] in "[{"
            self._calls = _ListedCalls() if listed else _HeadedCalls(self._name_of)
        if self._calls is not None:
            self._calls.feed(text, events)
        return events

    def end(self) -> list[Event]:
        """Return the events of what was held back."""
        events: list[Event] = []
        if not self._inside:
            self._text.feed(self._marked.drain(), events)
            self._text.end(events)
        elif self._calls is not None and (unread := self._calls.unread()):
            events.append(Content(self._marker + unread))
        return events


def mistral_parser() -> _TrailingCalls:
    """Return a parser of ``[TOOL_CALLS]`` and a list of objects, or ``name[ARGS]{...}``."""
    return _TrailingCalls("[TOOL_CALLS]", _mistral_name, may_be_list=True)


def _mistral_name(head: str) -> str:
    """Return ``name`` of ``[TOOL_CALLS]name[CALL_ID]abc[ARGS]``."""
    return head.rpartition("[TOOL_CALLS]")[2].partition("[")[0].strip()


def deepseek_parser() -> _TrailingCalls:
    """Return a parser of DeepSeek-V3's, R1's and V3.1's calls."""
    return _TrailingCalls("<｜tool▁calls▁begin｜>", _deepseek_name, may_be_list=False)


def _deepseek_name(head: str) -> str:
    """Return the name: V3 writes ``function<sep>name`` and a code block, V3.1 ``name<sep>``."""
    first, _, second = head.rpartition("<｜tool▁call▁begin｜>")[2].partition("<｜tool▁sep｜>")
    return second.replace("```json", "").strip() or first.strip()
