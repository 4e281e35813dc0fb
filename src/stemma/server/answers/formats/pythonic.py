"""Calls as Python writes them: ``[name(key="value"), ...]``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from stemma.server.answers import json_text
from stemma.server.answers.formats import literals
from stemma.server.answers.formats.forced import JsonForm, KeywordForm
from stemma.server.answers.formats.format import ToolFormat, Tools, shape
from stemma.server.answers.formats.tagged import tagged
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Reading, Scanner

_NAME = re.compile(r"[\w.\-]*")
_BETWEEN = re.compile(r"[\s,;\]]*")
_TAGS = ("<|python_start|>", "<|python_tag|>")
_END_TAG = "<|python_end|>"
_JSON_SHAPE = r'\{ "name" : "NAME" , "(arguments|parameters)" : \{ "KEY" : "VALUE" \} \} '
_CALL_SHAPE = """ NAME[(] KEY = ["']VALUE["'] [)] """


def _call(scanner: Scanner, parts: Parts, known: Collection[str] | None) -> Reading[bool]:
    name = yield from scanner.word(_NAME)
    if not name or (known is not None and name not in known) or not (yield from scanner.accept("(")):
        return False
    scanner.recorded()
    parts.call(name)
    begin = "{"
    while True:
        yield from scanner.space()
        if (yield from scanner.accept(")")):
            parts.arguments("{}" if begin == "{" else "}")
            return True
        key = yield from scanner.word(_NAME)
        yield from scanner.space()
        if not key or not (yield from scanner.accept("=")):
            break
        parts.arguments(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
        begin = ", "
        yield from literals.value(scanner, parts.arguments)
        yield from scanner.space()
        yield from scanner.accept(",")
    if not scanner.is_over:
        parts.arguments("{}" if begin == "{" else "}")
    return True


def _calls(scanner: Scanner, parts: Parts, known: Collection[str] | None) -> Reading[str | None]:
    """Read calls side by side, in a list or not; return the white space behind. None: no call."""
    scanner.record()
    yield from scanner.accept("[")
    yield from scanner.space()
    space = None
    while (yield from _call(scanner, parts, known)):
        gap = yield from scanner.word(_BETWEEN)
        space = gap[len(gap.rstrip()) :]
        scanner.record()
    return space if space is None else space + scanner.recorded()


def _marked(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[str | None]:
    return (yield from _calls(scanner, parts, None))


def _read_bare(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[None]:
    """Read an answer that is calls from its beginning, of known tools, as a list or as JSON objects."""
    scanner.record()
    yield from scanner.space()
    if (yield from scanner.accept(*_TAGS)):
        yield from scanner.space()
    if (yield from scanner.peek()) == "{":
        space = yield from json_text.calls(scanner, parts, tools)
    elif (yield from scanner.peek()) == "[":
        space = yield from _calls(scanner, parts, tools)
    else:
        space = None
    unread = scanner.recorded()
    if space is not None and (yield from scanner.accept(_END_TAG)):
        space = ""
    parts.content(unread if space is None else space)
    yield from scanner.all(parts.content)


def _form(before: str, between: str, after: str) -> KeywordForm:
    return KeywordForm(
        "NAME(",
        "KEY=",
        "",
        ")",
        separator=", ",
        before=before,
        between=between,
        after=after,
        strings="json",
        words=("True", "False"),
    )


PYTHONIC = ToolFormat(
    "pythonic",
    _read_bare,
    shape(r"\[" + _CALL_SHAPE + r"\]"),
    (),
    (*_TAGS, _END_TAG),
    _form("[", ", ", "]"),
)
"""Llama 4 and the small models of Llama 3.2; nothing marks a call, so only the request's tools make one."""
LLAMA3_JSON = ToolFormat(
    "llama3_json",
    _read_bare,
    shape(_JSON_SHAPE),
    (),
    (*_TAGS, _END_TAG),
    JsonForm('{"name": "NAME", "parameters": ARGUMENTS}', between="; "),
)
"""``{"name": ..., "parameters": {...}}``, several joined by ``;``, as Llama 3.1 writes them."""
OLMO3 = ToolFormat(
    "olmo3",
    tagged("<function_calls>", "</function_calls>", _marked),
    shape("<function_calls>" + _CALL_SHAPE + "</function_calls>"),
    ("<function_calls>",),
    ("</function_calls>",),
    _form("<function_calls>", "\n", "</function_calls>"),
)
LFM2 = ToolFormat(
    "lfm2",
    tagged("<|tool_call_start|>", "<|tool_call_end|>", _marked),
    shape(r"<\|tool_call_start\|> \[" + _CALL_SHAPE + r"\] <\|tool_call_end\|>"),
    ("<|tool_call_start|>",),
    ("<|tool_call_end|>",),
    _form("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
)
