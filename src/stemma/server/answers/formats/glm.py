"""GLM-4.5 to 5: ``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>``."""

from stemma.server.answers import json_text
from stemma.server.answers.formats.forced import KeywordForm
from stemma.server.answers.formats.format import ToolFormat, Tools, shape
from stemma.server.answers.formats.tagged import tagged
from stemma.server.answers.formats.typed import TypedArguments
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Markers, Reading, Scanner

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_BEHIND_NAME = Markers(_KEY, _CLOSE, _OPEN)
_BEHIND_KEY = Markers(_KEY_END, _CLOSE)
_BEHIND_VALUE = Markers(_VALUE_END, _KEY, _CLOSE)


def _body(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[str | None]:
    if (yield from scanner.peek()) == "{":
        return (yield from json_text.calls(scanner, parts))
    name, tag = yield from scanner.take(_BEHIND_NAME)
    name = name.strip()
    if tag is None or len(name.split()) != 1:
        return None
    scanner.recorded()
    parts.call(name)
    arguments = TypedArguments(parts, tools.get(name, {}))
    while tag == _KEY:
        key, _ = yield from scanner.take(_BEHIND_KEY)
        yield from scanner.space()
        if not (yield from scanner.accept(_VALUE)):
            break
        tag = yield from arguments.read(scanner, key.strip(), _BEHIND_VALUE)
        if tag is None:
            return ""
        if tag == _VALUE_END:
            yield from scanner.space()
            tag = yield from scanner.accept(_KEY)
    if tag == _OPEN:
        scanner.back(tag)
    if tag or not scanner.is_over:
        arguments.end()
    return ""


def _format(name: str, gap: str) -> ToolFormat:
    line = gap.encode("unicode_escape").decode()
    return ToolFormat(
        name,
        tagged(_OPEN, _CLOSE, _body),
        shape(rf"{_OPEN}NAME{line}{_KEY}KEY{_KEY_END}{line}{_VALUE}VALUE{_VALUE_END}{line}{_CLOSE}"),
        (_OPEN,),
        (_CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END),
        KeywordForm(
            head=f"{_OPEN}NAME{gap}",
            parameter=f"{_KEY}KEY{_KEY_END}{gap}{_VALUE}",
            value_end=f"{_VALUE_END}{gap}",
            tail=_CLOSE,
            between=gap,
        ),
    )


GLM = _format("glm", "\n")
GLM47 = _format("glm47", "")
"""GLM-4.7 and later: without line breaks."""
