"""The tools of a Responses request as functions that a model is offered, and the names to answer with.

A model knows functions alone. A tool in a namespace is offered under a joined name, one that takes plain
text as a function with one argument, one that OpenAI defines and clients run with arguments of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stemma.errors import InvalidRequest
from stemma.server.schemas.bounds import MAX_TOOLS
from stemma.server.schemas.responses import TOOLS

INPUT = "input"
"""The one argument of a tool that takes plain text."""
_JOINT = "__"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as a model is offered it."""

    kind: str
    name: str
    """Its own, which the client knows."""
    namespace: str | None
    function: Mapping[str, Any]
    """As the chat API has it."""
    grammar: Mapping[str, str] | None = None
    """Form of plain text that it takes, as vLLM's ``structured_outputs``; None: any."""


Offered = Mapping[str, OfferedTool]
"""Tools by the names that a model calls."""


def joined_name(namespace: object, name: str) -> str:
    """Return the name under which a model is offered a tool."""
    return f"{namespace}{_JOINT}{name}" if isinstance(namespace, str) and namespace else name


def offered_tools(tools: Sequence[Mapping[str, Any]]) -> Offered:
    """Return the tools that a model is offered. Raises InvalidRequest naming a wrong one."""
    found: dict[str, OfferedTool] = {}
    for where, namespace, tool in _flat(tools):
        offered = _offered(tool, namespace, where)
        found.setdefault(str(offered.function["name"]), offered)
        if len(found) > MAX_TOOLS:
            raise InvalidRequest(f"{where}: more than {MAX_TOOLS} tools", param="tools")
    return found


def _flat(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Yield (place, namespace, tool) of all tools, also of those in namespaces."""
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if not TOOLS.speaks(tool):
            continue
        if TOOLS.kind(tool) != "namespace":
            yield where, None, tool
            continue
        name, inner = _name(tool, where), tool.get("tools")
        if not isinstance(inner, list):
            raise InvalidRequest(f"{where}.tools must be a list", param=f"{where}.tools")
        for place, one in enumerate(inner):
            if TOOLS.speaks(one):
                yield f"{where}.tools[{place}]", name, one


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.name must be a string", param=f"{where}.name")
    return name


def _offered(tool: Mapping[str, Any], namespace: str | None, where: str) -> OfferedTool:
    kind = TOOLS.kind(tool)
    if kind == "namespace":
        raise InvalidRequest(f"{where}: a namespace can't hold another one", param=where)
    if kind in _DEFINED:
        description, parameters = _DEFINED[kind]
        function = {"name": kind, "description": description, "parameters": parameters}
        return OfferedTool(kind, kind, None, function)
    name = _name(tool, where)
    shown: dict[str, Any] = {"name": joined_name(namespace, name)}
    if kind == "custom":
        if isinstance(tool.get("description"), str):
            shown["description"] = tool["description"]
        grammar = _grammar(tool.get("format"), where)
        return OfferedTool(kind, name, namespace, {**shown, "parameters": _text_alone(grammar)}, grammar)
    known = ("description", "parameters", "strict")
    shown |= {field: tool[field] for field in known if tool.get(field) is not None}
    return OfferedTool(kind, name, namespace, shown)


def _grammar(given: Any, where: str) -> Mapping[str, str] | None:
    """Return the form of a custom tool's text. Raises InvalidRequest naming what is wrong with it."""
    if given is None or (isinstance(given, Mapping) and given.get("type") == "text"):
        return None
    syntax = given.get("syntax") if isinstance(given, Mapping) and given.get("type") == "grammar" else None
    definition = given.get("definition") if isinstance(given, Mapping) else None
    if syntax not in _SYNTAXES or not isinstance(definition, str):
        message = f"{where}.format must be text, or a grammar with a syntax (lark, regex) and a definition"
        raise InvalidRequest(message, param=f"{where}.format")
    return {_SYNTAXES[syntax]: definition}


_SYNTAXES = {"lark": "grammar", "regex": "regex"}
"""OpenAI's words for forms, and those of ``structured_outputs``."""


def _text_alone(grammar: Mapping[str, str] | None) -> dict[str, Any]:
    says = "The text that the tool takes."
    for kind, definition in (grammar or {}).items():
        notation = "Lark grammar" if kind == "grammar" else "regular expression"
        says = f"The text that the tool takes, in the form of this {notation}:\n{definition}"
    properties = {INPUT: {"type": "string", "description": says}}
    return {"type": "object", "properties": properties, "required": [INPUT], "additionalProperties": False}


def chosen(
    choice: str | Mapping[str, Any] | None, offered: Offered
) -> tuple[str | dict[str, Any] | None, OfferedTool | None]:
    """Return the chat API's ``tool_choice``, and the tool of plain text that must be called, if one must.

    Raises InvalidRequest if it demands what a model isn't offered.
    """
    if not isinstance(choice, Mapping):
        return choice, None
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, offered), None
    if choice.get("type") in ("none", "auto", "required"):
        return str(choice["type"]), None
    name = _called(choice)
    if name not in offered:
        shown = str(choice.get("name") or choice.get("type"))[:64]
        raise InvalidRequest(f"tool_choice: a model isn't offered {shown!r} here", param="tool_choice")
    tool = offered[name]
    if tool.grammar is not None:
        return "auto", tool
    return {"type": "function", "function": {"name": name}}, None


def _allowed(choice: Mapping[str, Any], offered: Offered) -> dict[str, Any]:
    """Return ``allowed_tools`` with the names that a model knows; what it isn't offered is left out."""
    tools = choice.get("tools")
    if not isinstance(tools, list):
        raise InvalidRequest("tool_choice.tools must be a list", param="tool_choice")
    names = [_called(tool) for tool in tools if TOOLS.speaks(tool)]
    if unknown := [name for name in names if name not in offered]:
        raise InvalidRequest(
            f"tool_choice: allowed_tools names {unknown[0][:64]!r}, which is none of tools",
            param="tool_choice",
        )
    return {**choice, "tools": [{"type": "function", "name": name} for name in names]}


def _called(choice: Mapping[str, Any]) -> str:
    """Return the name of the tool that a choice names; a tool that OpenAI defines has its kind's name."""
    return joined_name(choice.get("namespace"), str(choice.get("name") or choice.get("type") or ""))


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_WORDS = {"type": "array", "items": {"type": "string"}}
_MS = {"type": "integer", "description": "Time limit in milliseconds."}
_DEFINED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "local_shell": (
        "Run a program on the user's machine.",
        _object(
            ("command",),
            command={**_WORDS, "description": "The program and its arguments."},
            working_directory={"type": "string"},
            timeout_ms=_MS,
        ),
    ),
    "shell": (
        "Run commands in a shell on the user's machine.",
        _object(
            ("commands",),
            commands={**_WORDS, "description": "The commands, one after the other."},
            timeout_ms=_MS,
            max_output_length={"type": "integer", "description": "Characters of output to return at most."},
        ),
    ),
    "apply_patch": (
        "Create, change or delete a file.",
        _object(
            ("type", "path"),
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path={"type": "string"},
            diff={
                "type": "string",
                "description": "Changes in the V4A diff format; the lines of a new file.",
            },
        ),
    ),
}
"""Description and arguments of the tools that OpenAI defines and clients run."""
