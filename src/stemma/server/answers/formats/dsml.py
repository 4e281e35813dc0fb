"""DeepSeek-V3.2's and V4's ``DSML`` tags, which say of each value whether it is a string."""

from stemma.server.answers.formats.format import ToolFormat, shape
from stemma.server.answers.formats.tag_parameters import TagStyle, tag_calls, tag_form

_MARK = "｜DSML｜"


def _format(name: str, outer: str) -> ToolFormat:
    style = TagStyle(
        opener=f"<{_MARK}{outer}>",
        closer=f"</{_MARK}{outer}>",
        call=f'<{_MARK}invoke name="',
        call_end=f"</{_MARK}invoke>",
        parameter=f'<{_MARK}parameter name="',
        parameter_end=f"</{_MARK}parameter>",
        name_end='">',
        typed_ends=('" string="true">', '" string="false">'),
    )
    parameter = rf'<{_MARK}parameter name="KEY"( string="true")?>VALUE</{_MARK}parameter>'
    return ToolFormat(
        name,
        tag_calls(style),
        shape(f'<{_MARK}{outer}> <{_MARK}invoke name="NAME"> ' + parameter),
        (style.opener,),
        (style.closer, _MARK),
        tag_form(style, inner=False),
    )


DEEPSEEK_V32 = _format("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _format("deepseek_v4", "tool_calls")
