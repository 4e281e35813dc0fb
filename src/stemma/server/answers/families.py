"""How the served model writes its answers: by setting, or by what its chat template writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from stemma.errors import ConfigError
from stemma.server.answers.events import AnswerParser
from stemma.server.answers.reasoning import OPEN
from stemma.server.answers.tool_calls import (
    HermesParser,
    Llama3JsonParser,
    deepseek_parser,
    mistral_parser,
)

ToolParserFactory = Callable[[Collection[str]], AnswerParser]
"""Makes the parser of one answer, given the names of the request's tools."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes its tool calls."""

    parser: ToolParserFactory
    markers: tuple[str, ...]
    """Tokens that must not be left out of the text, special or not."""
    short_ids: bool = False
    """Whether the template takes only ids of nine letters and digits."""


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(lambda names: HermesParser(), ("<tool_call>", "</tool_call>")),
    "llama3_json": ToolFormat(Llama3JsonParser, ("<|python_tag|>",)),
    "mistral": ToolFormat(lambda names: mistral_parser(), ("[TOOL_CALLS]", "[ARGS]"), short_ids=True),
    "deepseek": ToolFormat(lambda names: deepseek_parser(), ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
}

_TEMPLATE_MARKS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)
"""Marks that a template writes around calls, each with its format; the first that occurs counts."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Kinds of content that answers of the served model may hold besides text."""

    tools: ToolFormat | None
    """None: calls are not looked for unless a request demands them."""
    reasoning: bool
    """Whether answers may begin with ``<think>``."""


def answer_format(tool_parser: str, reasoning_parser: str, chat_template: str | None) -> AnswerFormat:
    """Return the format that the settings name, or with ``auto`` what the template uses.

    Raises ConfigError for a name that doesn't exist.
    """
    return AnswerFormat(
        _tool_format(tool_parser, chat_template or ""), _reasoning(reasoning_parser, chat_template or "")
    )


def _tool_format(setting: str, template: str) -> ToolFormat | None:
    if setting == "auto":
        return next((TOOL_FORMATS[name] for mark, name in _TEMPLATE_MARKS if mark in template), None)
    if setting == "off":
        return None
    if setting not in TOOL_FORMATS:
        known = ", ".join(("auto", "off", *TOOL_FORMATS))
        raise ConfigError(f"there is no tool parser {setting!r}; choose one of {known}")
    return TOOL_FORMATS[setting]


def _reasoning(setting: str, template: str) -> bool:
    if setting == "auto":
        return OPEN in template
    if setting not in ("on", "off"):
        raise ConfigError(f"the reasoning parser is auto, on or off, not {setting!r}")
    return setting == "on"
