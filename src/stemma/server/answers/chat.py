"""Chat answers: which parser reads them, what grammar a request demands, and OpenAI's words for the parts."""

from __future__ import annotations

import logging
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from stemma.engine.sampling.calls import CallRule, CallRules
from stemma.engine.sampling.grammar import GrammarSpec
from stemma.engine.sampling.params import SamplingParams
from stemma.engine.sampling.thinking import ThinkingTokens
from stemma.errors import InvalidRequest
from stemma.model.text.tokenizer import Tokenizer
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
from stemma.server.answers.families import AnswerFormat
from stemma.server.answers.formats.forced import TextGrammar, forced_grammar, grammar_behind_head
from stemma.server.answers.formats.format import ReadCalls, ToolFormat
from stemma.server.answers.formats.harmony import read_harmony
from stemma.server.answers.formats.json_calls import read_forced
from stemma.server.answers.formats.thinking import (
    HARMONY_THINKING,
    Calls,
    Thinking,
    read_after_thinking,
)
from stemma.server.answers.parts import Parts, PlainParser, ReadingParser
from stemma.server.answers.scanning import Markers, Reading, Scanner

logger = logging.getLogger(__name__)
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
    strict: Collection[str] = ()
    """Tools whose arguments must follow their schema wherever they are called."""
    texts: Mapping[str, TextGrammar] = field(default_factory=dict)
    """Tools of one argument, a text, whose form it has."""

    @property
    def demanded(self) -> Mapping[str, Mapping[str, Any]]:
        """The tools of which one must be called; none: a call isn't demanded."""
        if self.mode == "named":
            return {self.named: self.schemas[self.named]}
        return self.schemas if self.mode == "required" else {}

    @property
    def is_single(self) -> bool:
        """Whether an answer may hold one call only."""
        return not self.parallel or self.mode == "named"


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: Choice | Mapping[str, Any] | None,
    *,
    parallel: bool,
    texts: Mapping[str, TextGrammar] | None = None,
) -> ToolUse:
    """Check OpenAI's `tools` and `tool_choice`. Raises InvalidRequest naming what is wrong.

    `texts`: the forms of the tools that take one text.
    """
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
    held = {name: text for name, text in (texts or {}).items() if name in schemas}
    if choice == "required":
        if not schemas:
            raise InvalidRequest("tool_choice is 'required', but there are no tools", param="tool_choice")
        return ToolUse(schemas, "required", parallel=parallel, texts=held)
    if not schemas or choice == "none":
        return ToolUse(schemas, parallel=parallel)
    strict = {tool["function"]["name"] for tool in tools or () if tool["function"].get("strict") is True}
    return ToolUse(schemas, "auto", parallel=parallel, strict=strict & schemas.keys(), texts=held)


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
        calls = self._calls()
        if calls is None and self.format.thinking is None:
            return PlainParser()
        return ReadingParser(self._reading(calls), 1 if self.tools.is_single else None)

    def _reading(self, calls: ReadCalls | None) -> Callable[[Scanner, Parts], Reading[None]]:
        thinking, tools = self.format.thinking, self.tools.schemas
        if thinking is HARMONY_THINKING:
            return partial(read_harmony, tools=tools, opened=self.opened, with_calls=calls is not None)
        if thinking is None:
            assert calls is not None
            return lambda scanner, parts: calls(scanner, parts, tools)
        opens = self.format.tools.opens if self.format.tools is not None and calls is not None else ()
        return partial(
            read_after_thinking,
            tools=tools,
            thinking=Thinking(thinking, self.opened),
            rest=calls,
            opens=Markers(thinking.closer, *opens),
        )

    def _calls(self) -> ReadCalls | None:
        """Return what reads the calls; None: there are none."""
        own = None if self.format.tools is None else self.format.tools.read
        if self.tools.mode == "auto":
            return own
        return partial(read_forced, own) if self.tools.demanded else None

    def constrain(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """Return `params` with what the answer needs: a grammar for forced calls, markers left in the text,
        and the tokens that end its thinking if that has a budget.

        A response format is the form of the answer's text. A forced call leaves no text, so beside one the
        format has nothing to say. Raises InvalidRequest for any other form beside a forced call.
        """
        token_ids = self._special_ids(tokenizer)
        forced = self._forced(token_ids)
        is_format = params.grammar is not None and params.grammar.param == "response_format"
        if forced is not None and params.grammar is not None and not is_format:
            message = f"{params.grammar.param} and a forced tool_choice can't be combined"
            raise InvalidRequest(message, param=params.grammar.param)
        grammar = forced or params.grammar
        if grammar is not None and self.format.thinking is not None:
            is_call = forced is not None
            before = self.format.thinking.before_grammar(token_ids, is_open=self.opened, is_call=is_call)
            grammar = replace(grammar, before=before)
        skips = params.skip_special_tokens and not token_ids
        thinking = None if params.max_thinking_tokens is None else self._thinking_tokens(tokenizer)
        calls = self._call_rules(tokenizer, token_ids) if grammar is None else None
        return replace(params, grammar=grammar, skip_special_tokens=skips, thinking=thinking, calls=calls)

    def _call_rules(self, tokenizer: Tokenizer, token_ids: Mapping[str, int]) -> CallRules | None:
        """Return what calls that the model may make must follow; None: nothing."""
        rules: list[CallRule] = []
        for name in dict.fromkeys((*self.tools.texts, *sorted(self.tools.strict))):
            rules += self._rules_of(name, token_ids)
        if not rules:
            return None
        thinking = self.format.thinking
        marks = None if thinking is None else thinking.marks(is_open=self.opened)
        return CallRules(tuple(rules), marks, tokenizer.spelling)

    def _rules_of(self, name: str, token_ids: Mapping[str, int]) -> list[CallRule]:
        form = None if self.format.tools is None else self.format.tools.form
        text = self.tools.texts.get(name)
        try:
            heads, grammar = grammar_behind_head(form, name, self.tools.schemas, text, token_ids)
        except (ValueError, InvalidRequest, RecursionError) as error:
            kind = "no format of calls" if self.format.tools is None else self.format.tools.name
            logger.info("calls of the tool %.64r stay free (%s): %.200s", name, kind, error)
            return []
        return [CallRule("".join(head.split()).encode(), grammar) for head in heads]

    def _special_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Return the markers that are special tokens, with their ids."""
        read = replace(self.format, tools=None) if self.tools.mode == "off" else self.format
        hidden = read.hidden_markers(tokenizer.special_token_texts)
        return {marker: int(tokenizer.encode(marker, add_special_tokens=False)[0]) for marker in hidden}

    def _forced(self, token_ids: Mapping[str, int]) -> GrammarSpec | None:
        """Return the form of the call that is demanded, if one is."""
        if not self.tools.demanded:
            return None
        form = None if self.format.tools is None else self.format.tools.form
        single = self.tools.is_single
        try:
            text = forced_grammar(form, self.tools.demanded, token_ids, single=single, texts=self.tools.texts)
        except ValueError as error:
            message = f"the form of a tool's text can't stand in this model's calls: {error}"
            raise InvalidRequest(message, param="tools") from error
        except RecursionError as error:
            raise InvalidRequest("tools: a schema nests too deeply", param="tools") from error
        return GrammarSpec("grammar", text, param="tools")

    def _thinking_tokens(self, tokenizer: Tokenizer) -> ThinkingTokens | None:
        if self.format.thinking is None:
            return None
        calls: Calls = "must" if self.tools.demanded else "may" if self.tools.mode == "auto" else "none"
        encode = partial(tokenizer.encode, add_special_tokens=False)
        return self.format.thinking.tokens(
            lambda text: encode(text).tolist(), tokenizer.spelling, is_open=self.opened, calls=calls
        )


def message_of(answer: Answer, tools: ToolFormat | None) -> dict[str, Any]:
    """Return the message of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message |= _reasoning(answer.reasoning)
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": call.call_id or new_call_id(tools),
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
        case CallStart(index, name, call_id):
            call_id = call_id or new_call_id(tools)
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
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
