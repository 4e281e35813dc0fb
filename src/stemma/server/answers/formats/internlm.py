"""InternLM: ``<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>``."""

from stemma.server.answers import json_text
from stemma.server.answers.formats.forced import JsonForm
from stemma.server.answers.formats.format import ToolFormat, Tools, shape
from stemma.server.answers.formats.tagged import tagged
from stemma.server.answers.parts import Parts
from stemma.server.answers.scanning import Reading, Scanner


def _body(scanner: Scanner, parts: Parts, tools: Tools) -> Reading[str | None]:
    yield from scanner.accept("<|plugin|>")
    return (yield from json_text.calls(scanner, parts))


INTERNLM = ToolFormat(
    "internlm",
    tagged("<|action_start|>", "<|action_end|>", _body),
    shape(r'<\|action_start\|> <\|plugin\|> \{ "name" : "NAME"'),
    ("<|action_start|>",),
    ("<|action_end|>", "<|plugin|>"),
    JsonForm('<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ARGUMENTS}<|action_end|>'),
)
