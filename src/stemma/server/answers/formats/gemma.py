"""Gemma 4: ``<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>``."""

import re

from stemma.server.answers.formats import literals
from stemma.server.answers.formats.forced import KeywordForm
from stemma.server.answers.formats.format import ToolFormat, Tools, shape
from stemma.server.answers.formats.tagged import tagged
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Reading, Scanner

_QUOTE = '<|"|>'
_NAME = re.compile(r"[^\s{}<>]*")


def _body(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[str | None]:
    if not (yield from scanner.accept("call:")):
        return None
    yield from scanner.space()
    name = yield from scanner.word(_NAME)
    if not name or (yield from scanner.peek()) != "{":
        return None
    scanner.recorded()
    parts.call(name)
    yield from literals.value(scanner, parts.arguments, (_QUOTE, '"'))
    return ""


GEMMA4 = ToolFormat(
    "gemma4",
    tagged("<|tool_call>", "<tool_call|>", _body),
    shape(r'<\|tool_call> call: NAME\{ KEY : <\|"\|>VALUE<\|"\|> \} <tool_call\|>'),
    ("<|tool_call>",),
    ("<tool_call|>", _QUOTE),
    KeywordForm("<|tool_call>call:NAME{", "KEY:", "", "}<tool_call|>", separator=",", quote=_QUOTE),
)
