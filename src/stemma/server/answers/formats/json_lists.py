"""A list of ``{"name": ..., "arguments": {...}}`` between markers of each family's own."""

import re

from stemma.server.answers.formats.forced import JsonForm
from stemma.server.answers.formats.format import ToolFormat, shape
from stemma.server.answers.formats.tagged import json_calls, tagged

_UNWRITTEN = "<|/tool_call|>"
"""Read where a model writes it, but templates don't."""


def _listed(name: str, opener: str, closer: str) -> ToolFormat:
    written_closer = "" if closer == _UNWRITTEN else closer
    written = re.escape(opener).replace(r"\ ", " ")
    return ToolFormat(
        name,
        tagged(opener, closer, json_calls),
        shape(written + r' \[? \{ [^[]*?"name" : "NAME" , "(arguments|parameters)" : \{ "KEY" : "VALUE" \} '),
        (opener,),
        (closer,),
        JsonForm('{"name": "NAME", "arguments": ARGUMENTS}', f"{opener}[", ", ", f"]{written_closer}"),
    )


GRANITE = _listed("granite", "<|tool_call|>", _UNWRITTEN)
"""Granite 3 and Phi-4 mini."""
PHI4 = _listed("phi4", "functools", _UNWRITTEN)
NEMOTRON = _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>")
JAMBA = _listed("jamba", "<tool_calls>", "</tool_calls>")
"""Jamba, Hunyuan, MiniMax-M1 (without the list), Apriel."""
