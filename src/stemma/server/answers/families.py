"""Which parser reads a model's answers: by name, or by what its chat template writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from stemma.errors import ConfigError
from stemma.server.answers.events import AnswerParser
from stemma.server.answers.reasoning import OPEN, PlainParser, ReasoningParser
from stemma.server.answers.tool_calls import (
    HermesParser,
    Llama3JsonParser,
    deepseek_parser,
    mistral_parser,
)

ToolParserFactory = Callable[[Collection[str]], AnswerParser]
"""Makes the parser of one answer, given the names of the request's tools."""

TOOL_PARSERS: Mapping[str, ToolParserFactory] = {
    "hermes": lambda names: HermesParser(),
    "llama3_json": Llama3JsonParser,
    "mistral": lambda names: mistral_parser(),
    "deepseek": lambda names: deepseek_parser(),
}

_TEMPLATE_MARKS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)
"""What a template writes around calls, and the format that this is; the first that occurs counts."""


def tool_parser_name(setting: str, chat_template: str | None) -> str | None:
    """Return the name of the format: `setting`, or with ``auto`` what the template uses; None: no calls.

    Raises ConfigError for a name that doesn't exist.
    """
    if setting == "auto":
        template = chat_template or ""
        return next((name for mark, name in _TEMPLATE_MARKS if mark in template), None)
    if setting == "off":
        return None
    if setting not in TOOL_PARSERS:
        known = ", ".join(("auto", "off", *TOOL_PARSERS))
        raise ConfigError(f"there is no tool parser {setting!r}; choose one of {known}")
    return setting


def splits_reasoning(setting: str, chat_template: str | None) -> bool:
    """Return whether answers are split at ``</think>``: ``on``, ``off``, or ``auto`` by the template."""
    if setting == "auto":
        return OPEN in (chat_template or "")
    if setting not in ("on", "off"):
        raise ConfigError(f"the reasoning parser is auto, on or off, not {setting!r}")
    return setting == "on"


def answer_parser(
    tool_format: str | None, tool_names: Collection[str], *, reasoning: bool, opened: bool
) -> AnswerParser:
    """Return the parser of one answer.

    `tool_format` is a name of `TOOL_PARSERS`, or None where calls are not looked for; `opened` says that the
    prompt ends inside the reasoning.
    """
    parser: AnswerParser = PlainParser() if tool_format is None else TOOL_PARSERS[tool_format](tool_names)
    return ReasoningParser(parser, opened=opened) if reasoning else parser
