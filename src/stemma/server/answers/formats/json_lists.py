"""A list of ``{"name": ..., "arguments": {...}}`` between markers of each family's own."""

import re

from stemma.server.answers.formats.format import ToolFormat, shape
from stemma.server.answers.formats.tagged import json_calls, tagged


def _listed(name: str, opener: str, closer: str) -> ToolFormat:
    written = re.escape(opener).replace(r"\ ", " ")
    return ToolFormat(
        name,
        tagged(opener, closer, json_calls),
        shape(written + r' \[? \{ [^[]*?"name" : "NAME" , "(arguments|parameters)" : \{ "KEY" : "VALUE" \} '),
        (opener,),
        (closer,),
    )


GRANITE = _listed("granite", "<|tool_call|>", "<|/tool_call|>")
"""Granite 3 and Phi-4 mini."""
PHI4 = _listed("phi4", "functools", "<|/tool_call|>")
NEMOTRON = _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>")
JAMBA = _listed("jamba", "<tool_calls>", "</tool_calls>")
"""Jamba, Hunyuan, MiniMax-M1 (without the list), Apriel."""
