"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number."""

from stemma.server.answers.formats.forced import JsonForm
from stemma.server.answers.formats.format import ToolFormat, shape
from stemma.server.answers.formats.tagged import json_calls, tagged

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HERMES = ToolFormat(
    "hermes",
    tagged(OPEN, CLOSE, json_calls),
    shape(r'<tool_call> \{[^<]*"name" : "NAME"[^<]*\} </tool_call>'),
    (OPEN,),
    (CLOSE,),
    JsonForm('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', between="\n"),
)
