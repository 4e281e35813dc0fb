"""``<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke>...``."""

from stemma.server.answers.formats.format import ToolFormat, shape
from stemma.server.answers.formats.tag_parameters import TagStyle, tag_calls, tag_form

_STYLE = TagStyle(
    opener="<minimax:tool_call>",
    closer="</minimax:tool_call>",
    call='<invoke name="',
    call_end="</invoke>",
    parameter='<parameter name="',
    parameter_end="</parameter>",
    name_end='">',
)
MINIMAX = ToolFormat(
    "minimax_m2",
    tag_calls(_STYLE),
    shape('<minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">VALUE</parameter> </invoke> '),
    (_STYLE.opener,),
    (_STYLE.closer,),
    tag_form(_STYLE, inner=False),
)
