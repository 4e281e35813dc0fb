"""The tools of a Messages request as functions: the client's own, and those that Anthropic defines.

Of those, requests give only the kind; their arguments are as Anthropic documents them, in our words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stemma.errors import InvalidRequest
from stemma.server.schemas.messages import TOOLS, ClaudeTool, ToolChoice


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(says: str) -> dict[str, str]:
    return {"type": "string", "description": says}


def _one_of(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words)}


_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "First and last line; -1: to the end.",
}
_LINE = {"type": "integer", "description": "Insert behind this line; 0: at the beginning."}
_FILE_TEXT = _text("Content of the new file.")
_OLD, _NEW = _text("Text to replace; occurs once."), _text("Text that takes its place.")
_DEFINED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Run a command in a shell that stays open between calls.",
        _object(
            (),
            command=_text("The command."),
            restart={"type": "boolean", "description": "Start the shell anew instead."},
        ),
    ),
    "text_editor": (
        "View, create and change text files.",
        _object(
            ("command", "path"),
            command=_one_of("view", "create", "str_replace", "insert"),
            path=_text("The file or directory."),
            view_range=_RANGE,
            file_text=_FILE_TEXT,
            old_str=_OLD,
            new_str=_NEW,
            insert_line=_LINE,
            insert_text=_text("Text to insert."),
        ),
    ),
    "memory": (
        "Keep notes in files below /memories.",
        _object(
            ("command",),
            command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            path=_text("The file or directory."),
            view_range=_RANGE,
            file_text=_FILE_TEXT,
            old_str=_OLD,
            new_str=_NEW,
            insert_line=_LINE,
            insert_text=_text("Text to insert."),
            old_path=_text("The file's path."),
            new_path=_text("Its new path."),
        ),
    ),
}
"""Description and arguments of the tools that Anthropic defines and clients run."""


def chat_tools(tools: Sequence[ClaudeTool]) -> list[dict[str, Any]]:
    """Return the tools that a model is offered, as functions. Raises InvalidRequest naming a wrong one."""
    return [
        {"type": "function", "function": _function(tool, f"tools[{number}]")}
        for number, tool in enumerate(tools)
        if tool.kind in TOOLS.spoken
    ]


def _function(tool: ClaudeTool, where: str) -> dict[str, Any]:
    if not tool.name:
        raise InvalidRequest(f"{where}.name is missing", param=f"{where}.name")
    description, schema = _DEFINED.get(tool.kind, (tool.description, tool.input_schema))
    if schema is None:
        raise InvalidRequest(f"{where}.input_schema is missing", param=f"{where}.input_schema")
    function = {"name": tool.name, "parameters": schema}
    return function if description is None else {**function, "description": description}


def tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    """Return the chat API's ``tool_choice``. Raises InvalidRequest if the name is missing."""
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name is missing", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
