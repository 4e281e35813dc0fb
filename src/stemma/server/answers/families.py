"""How the served model writes its answers: by setting, or by what its chat template writes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from stemma.errors import ConfigError
from stemma.server.answers.formats.format import ToolFormat
from stemma.server.answers.formats.recognition import Template, recognized
from stemma.server.answers.formats.registry import TOOL_FORMATS
from stemma.server.answers.formats.thinking import (
    HARMONY_THINKING,
    THINK,
    THINKING_FORMATS,
    ThinkingFormat,
)

_FORMER_NAMES = {"deepseek": "deepseek_v31"}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Kinds of content that answers of the served model may hold besides text."""

    tools: ToolFormat | None
    """None: calls are not looked for unless a request demands them."""
    thinking: ThinkingFormat | None
    """None: answers are taken as they are."""

    def hidden_markers(self, special_tokens: Collection[str]) -> list[str]:
        """Return the markers that would be left out of the text as special tokens."""
        forms = [form for form in (self.tools, self.thinking) if form is not None]
        return [marker for form in forms for marker in form.markers if marker in special_tokens]


def answer_format(tool_parser: str, reasoning_parser: str, template: Template) -> AnswerFormat:
    """Return the format that the settings name, or with ``auto`` what the template writes.

    Raises ConfigError for a name that doesn't exist.
    """
    tool_parser = _FORMER_NAMES.get(tool_parser, tool_parser)
    _check("tool parser", tool_parser, ("auto", "off", *TOOL_FORMATS))
    _check("reasoning parser", reasoning_parser, ("auto", "on", "off", *THINKING_FORMATS))
    tools, thinking = recognized(template)
    if tool_parser != "auto":
        tools = TOOL_FORMATS.get(tool_parser)
    if reasoning_parser == "on":
        thinking = thinking or THINK
    elif reasoning_parser != "auto":
        thinking = THINKING_FORMATS.get(reasoning_parser)
    if tools is not None and tools.name == "harmony" and reasoning_parser == "auto":
        thinking = HARMONY_THINKING
    return AnswerFormat(tools, thinking)


def _check(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"there is no {what} {name!r}; choose one of {', '.join(known)}")


def said(form: AnswerFormat, template: Template) -> tuple[str, bool]:
    """Return one line on what is read from answers, and whether it is a warning."""
    tools = "off" if form.tools is None else form.tools.name
    thinking = "off" if form.thinking is None else form.thinking.name
    line = f"tool calls: {tools}; thinking: {thinking}"
    if form.tools is None and "tools" in (template.chat_template or ""):
        unknown = "the chat template shows tools, but writes calls in a way that isn't known here"
        return f"{line}; {unknown}: name one with --tool-parser, or calls come back as text", True
    return line, False
