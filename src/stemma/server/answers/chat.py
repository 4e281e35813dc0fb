"""Chat answers: which parser reads them, what grammar a request demands, and OpenAI's words for the parts."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import InvalidRequest
from stemma.server.answers.events import (
    Answer,
    AnswerParser,
    CallArguments,
    CallStart,
    Content,
    Event,
    Reasoning,
    parse,
)
from stemma.server.answers.families import AnswerFormat, ToolFormat
from stemma.server.answers.reasoning import PlainParser, ReasoningParser
from stemma.server.answers.tool_calls import ForcedCallsParser, NamedCallParser

_ID_CHARS = string.ascii_letters + string.digits

Choice = Literal["none", "auto", "required"] | str
"""How tools are used; any other word is the name of the one tool that must be called."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, checked."""

    schemas: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the arguments, by name."""
    mode: Literal["off", "auto", "required", "named"] = "off"
    named: str = ""
    parallel: bool = True
    """Whether an answer may hold more than one call."""

    @property
    def grammar(self) -> GrammarSpec | None:
        """The form that the answer must have, where the request demands a call."""
        if self.mode == "named":
            schema: Mapping[str, Any] = self.schemas[self.named]
        elif self.mode == "required":
            calls = [_call_schema(name, arguments) for name, arguments in self.schemas.items()]
            schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
            if not self.parallel:
                schema = {**schema, "maxItems": 1}
        else:
            return None
        return GrammarSpec("json_schema", orjson.dumps(schema).decode(), param="tools")


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None, choice: Choice | Mapping[str, Any] | None, *, parallel: bool
) -> ToolUse:
    """Check OpenAI's `tools` and `tool_choice`. Raises InvalidRequest naming what is wrong."""
    schemas: Mapping[str, Mapping[str, Any]]
    schemas = dict(_schema(tool, f"tools[{number}]") for number, tool in enumerate(tools or ()))
    named = ""
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        schemas, choice = _allowed(schemas, choice)
    if isinstance(choice, Mapping):
        named = _function_name(choice)
        if named not in schemas:
            raise InvalidRequest(
                f"tool_choice names {named[:64]!r}, which is none of tools", param="tool_choice"
            )
        return ToolUse(schemas, "named", named, parallel)
    if choice == "required":
        if not schemas:
            raise InvalidRequest("tool_choice is 'required', but there are no tools", param="tool_choice")
        return ToolUse(schemas, "required", parallel=parallel)
    return ToolUse(schemas, "auto" if schemas and choice != "none" else "off", parallel=parallel)


def _allowed(
    schemas: Mapping[str, Mapping[str, Any]], choice: Mapping[str, Any]
) -> tuple[Mapping[str, Mapping[str, Any]], Choice]:
    """Return the tools that ``allowed_tools`` leaves, and whether one of them must be called.

    The prompt shows all tools all the same, so that what is cached of it stays useful.
    """
    given = choice.get("allowed_tools", choice)
    tools = given.get("tools") if isinstance(given, Mapping) else None
    mode = given.get("mode", "auto") if isinstance(given, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidRequest("allowed_tools needs a mode, auto or required, and tools", param="tool_choice")
    names = [_function_name(tool) for tool in tools]
    for name in names:
        if name not in schemas:
            raise InvalidRequest(
                f"allowed_tools names {name[:64]!r}, which is none of tools", param="tool_choice"
            )
    return {name: schemas[name] for name in names}, mode


def _function_name(choice: object) -> str:
    """Return the name in ``{"function": {"name": ...}}`` (chat) or ``{"name": ...}`` (Responses)."""
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _schema(tool: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise InvalidRequest(f"{where}: only tools of type 'function' are supported", param=where)
    name, parameters = function.get("name"), function.get("parameters") or {"type": "object"}
    if not isinstance(name, str) or not name or not isinstance(parameters, Mapping):
        raise InvalidRequest(
            f"{where}.function needs a name, and parameters that are a JSON schema", param=where
        )
    return name, parameters


def _call_schema(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads the answers of one request."""

    format: AnswerFormat
    tools: ToolUse
    opened: bool
    """The prompt ends inside the reasoning."""
    with_reasoning: bool = True
    """Whether the client wants the reasoning."""

    def read(self, text: str) -> Answer:
        """Return the parts of a whole answer."""
        answer = parse(self.parser(), text)
        return answer if self.with_reasoning else replace(answer, reasoning="")

    def tools_called(self, text: str) -> tuple[str, ...]:
        """Return the names of the tools that a whole answer calls, in order."""
        return tuple(call.name for call in self.read(text).calls)

    def parser(self) -> AnswerParser:
        """Return a parser for one choice."""
        inner: AnswerParser = PlainParser()
        if self.tools.mode == "named":
            inner = NamedCallParser(self.tools.named)
        elif self.tools.mode == "required":
            inner = ForcedCallsParser()
        elif self.tools.mode == "auto" and self.format.tools is not None:
            inner = self.format.tools.parser(frozenset(self.tools.schemas))
        if not self.tools.parallel:
            inner = _FirstCall(inner)
        return ReasoningParser(inner, opened=self.opened) if self.format.reasoning else inner

    def constrain(self, params: SamplingParams, special_tokens: Collection[str]) -> SamplingParams:
        """Return `params` with what the answer needs: a grammar for forced calls, markers left in the text.

        A response format is the form of the answer's text. A forced call leaves no text, so beside one the
        format has nothing to say. Raises InvalidRequest for any other form beside a forced call.
        """
        forced = self.tools.grammar
        is_format = params.grammar is not None and params.grammar.param == "response_format"
        if forced is not None and params.grammar is not None and not is_format:
            message = f"{params.grammar.param} and a forced tool_choice can't be combined"
            raise InvalidRequest(message, param=params.grammar.param)
        grammar = forced or params.grammar
        if grammar is not None and self.format.reasoning:
            grammar = replace(grammar, reasoning="opened" if self.opened else "optional")
        tools = self.format.tools if self.tools.mode == "auto" else None
        keeps = tools is not None and any(marker in special_tokens for marker in tools.markers)
        return replace(params, grammar=grammar, skip_special_tokens=params.skip_special_tokens and not keeps)


class _FirstCall:
    """Drops all calls but the first."""

    def __init__(self, inner: AnswerParser) -> None:
        self._inner = inner

    def feed(self, text: str) -> list[Event]:
        """Return the events of `text`."""
        return _only_first(self._inner.feed(text))

    def end(self) -> list[Event]:
        """Return the events of what was held back."""
        return _only_first(self._inner.end())


def _only_first(events: list[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, CallStart | CallArguments) or event.index == 0]


def message_of(answer: Answer, tools: ToolFormat | None) -> dict[str, Any]:
    """Return the message of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message |= _reasoning(answer.reasoning)
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": new_call_id(tools),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message


def delta_of(event: Event, tools: ToolFormat | None) -> dict[str, Any]:
    """Return the delta of one event."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallStart(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": new_call_id(tools), "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _reasoning(text: str) -> dict[str, str]:
    """DeepSeek, MindIE and SGLang say ``reasoning_content``, vLLM says ``reasoning``."""
    return {"reasoning_content": text, "reasoning": text}


def new_call_id(tools: ToolFormat | None) -> str:
    """Return a fresh id of a call."""
    if tools is not None and tools.short_ids:
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
