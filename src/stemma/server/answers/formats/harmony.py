"""GPT-OSS's harmony: messages in channels.

``<|channel|>analysis<|message|>...<|end|>`` is thinking, ``final`` and ``commentary`` are text, and a message
``to=functions.name`` is a call. The prompt ends behind ``<|start|>assistant``.
"""

from __future__ import annotations

import re

from stemma.server.answers.formats.forced import JsonForm
from stemma.server.answers.formats.format import ToolFormat, Tools, shape
from stemma.server.answers.formats.headed import json_arguments
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Markers, Reading, Scanner

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CALL_HEAD_ENDS = (f"{_CONSTRAIN}json{_MESSAGE}", f"json{_MESSAGE}", _MESSAGE)
_HEAD_ENDS = Markers(_MESSAGE, *_ENDS)
_BODY_ENDS = Markers(*_ENDS, _START, _CHANNEL)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


def read_harmony(
    scanner: Scanner, parts: Parts, tools: Tools, *, opened: bool = False, with_calls: bool = True
) -> Reading[None]:
    """Read all messages. `opened`: the prompt ends inside the thinking."""
    last = ""
    if opened:
        last = "analysis"
        yield from _body(scanner, parts, last, "")
    elif not (yield from _begins_message(scanner)):
        yield from scanner.until(_BODY_ENDS, parts.content)
    while not scanner.is_over:
        head, end = yield from scanner.take(_HEAD_ENDS)
        if end is None and _CHANNEL not in head and _START not in head:
            parts.content(head)
        if end != _MESSAGE:
            continue
        channel, recipient = _said(head)
        if channel == last and not recipient:
            (parts.reasoning if channel == "analysis" else parts.content)("\n")
        last = "" if recipient else channel
        yield from _body(scanner, parts, channel, recipient if with_calls else "")


def _begins_message(scanner: Scanner) -> Reading[bool]:
    """Return whether a message's head follows, and go back before it."""
    found = yield from scanner.accept(_CHANNEL, _START, _MESSAGE, " to=", "to=")
    if found:
        scanner.back(found)
    return bool(found)


def _said(head: str) -> tuple[str, str]:
    """Return the channel of a message, and the tool that it calls; empty: none."""
    channel, recipient = _CHANNEL_NAME.search(head), _RECIPIENT.search(head)
    tool = recipient.group(1) if recipient is not None else ""
    return (channel.group(1) if channel is not None else "final"), tool.removeprefix("functions.")


def _body(scanner: Scanner, parts: Parts, channel: str, tool: str) -> Reading[None]:
    if tool:
        parts.call(tool)
        yield from json_arguments(scanner, parts, _BODY_ENDS)
        yield from scanner.space()
    tell = parts.reasoning if channel == "analysis" and not tool else parts.content
    end = yield from scanner.until(_BODY_ENDS, tell)
    if end in (_START, _CHANNEL):
        scanner.back(end)


def _read(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[None]:
    yield from read_harmony(scanner, parts, tools)


HARMONY = ToolFormat(
    "harmony",
    _read,
    shape(r'to=functions\.NAME[^{]*<\|message\|> (\{ "KEY" : "VALUE" \} |"\{ \\"KEY\\" : \\"VALUE\\" \} ")'),
    (_CHANNEL, _START),
    (_MESSAGE, _CONSTRAIN, *_ENDS),
    JsonForm(
        f"{_CHANNEL}commentary to=functions.NAME {_CONSTRAIN}json{_MESSAGE}" + "ARGUMENTS",
        may_repeat=False,
        other_heads=tuple(f"to=functions.NAME{_CHANNEL}commentary{end}" for end in _CALL_HEAD_ENDS)
        + tuple(f"to=functions.NAME{end}" for end in _CALL_HEAD_ENDS),
    ),
)
