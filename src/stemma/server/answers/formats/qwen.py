"""``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``, in lines."""

from dataclasses import replace

from stemma.server.answers.formats.format import ToolFormat, shape
from stemma.server.answers.formats.tag_parameters import TagStyle, tag_calls, tag_form

_STYLE = TagStyle(
    opener="<tool_call>",
    closer="</tool_call>",
    call="<function=",
    call_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    trims=True,
)
_VERBATIM = replace(_STYLE, trims=False)
_SEED = replace(_VERBATIM, opener="<seed:tool_call>", closer="</seed:tool_call>")
_BODY = " <function=NAME> <parameter=KEY>{}VALUE{}</parameter> </function> "

QWEN = ToolFormat(
    "qwen3_coder",
    tag_calls(_STYLE),
    shape("<tool_call>" + _BODY.format(r"\n", r"\n") + "</tool_call>"),
    ("<tool_call>",),
    ("</tool_call>",),
    tag_form(_STYLE),
)
"""Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Step 3.5."""
MIMO = ToolFormat(
    "mimo",
    tag_calls(_VERBATIM),
    shape("<tool_call>" + _BODY.format("", "") + "</tool_call>"),
    ("<tool_call>",),
    ("</tool_call>",),
    tag_form(_VERBATIM),
)
"""The same with values as they stand."""
SEED = ToolFormat(
    "seed_oss",
    tag_calls(_SEED),
    shape("<seed:tool_call>" + _BODY.format(" ", " ") + "</seed:tool_call>"),
    (_SEED.opener,),
    (_SEED.closer,),
    tag_form(_SEED),
)
