"""Cohere: ``<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>``, or a response."""

from stemma.server.answers.formats.forced import JsonForm
from stemma.server.answers.formats.format import ToolFormat, Tools, shape
from stemma.server.answers.formats.tagged import json_calls, tagged_once
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Markers, Reading, Scanner

_OPEN, _CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
_MARKERS = Markers(_OPEN, *_RESPONSE)


def _read(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[None]:
    while (marker := (yield from scanner.until(_MARKERS, parts.content))) is not None:
        if marker == _OPEN:
            yield from tagged_once(scanner, parts, tools, json_calls, _OPEN, _CLOSE)


COHERE = ToolFormat(
    "cohere",
    _read,
    shape(r'<\|START_ACTION\|> \[ \{ [^[]*?"tool_name" : "NAME" , "parameters" : \{ "KEY" : "VALUE" \} '),
    (_OPEN,),
    (_CLOSE, *_RESPONSE),
    JsonForm(
        '    {"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ARGUMENTS}',
        f"{_OPEN}[\n",
        ",\n",
        f"\n]{_CLOSE}",
    ),
)
