"""Calls as the items of a response: one while it is written, and back from an item to a function's call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from stemma.server.apis.responses.plain_input import PlainInput
from stemma.server.apis.responses.tools import INPUT, OfferedTool, joined_name
from stemma.server.turn.call_arguments import call_arguments


@dataclass(frozen=True, slots=True)
class _Form:
    """How the calls of one kind of tool look."""

    item_type: str
    id_prefix: str
    field: str
    """Where its arguments are."""
    told_as: str | None = None
    """Name of the events that tell of the arguments; None: they are told whole."""
    always: Mapping[str, Any] | None = None
    """What arguments that are an object have besides what the model wrote; None: they are text."""


_FORMS = {
    "function": _Form("function_call", "fc", "arguments", "function_call_arguments"),
    "custom": _Form("custom_tool_call", "ctc", INPUT, "custom_tool_call_input"),
    "local_shell": _Form("local_shell_call", "lsh", "action", always={"type": "exec", "env": {}}),
    "shell": _Form("shell_call", "sh", "action", always={"timeout_ms": None, "max_output_length": None}),
    "apply_patch": _Form("apply_patch_call", "apc", "operation", always={}),
}
CALL_ITEMS = {form.item_type: kind for kind, form in _FORMS.items()}
"""Kinds of tools by the types of their calls' items."""


class OpenCall:
    """A call that is being written."""

    def __init__(self, tool: OfferedTool | None, name: str, *, is_plain: bool = False) -> None:
        """`tool` None: a model made up its `name`. `is_plain`: what comes is the text itself, not JSON."""
        self._kind = "function" if tool is None else tool.kind
        self._form = _FORMS[self._kind]
        self._input = PlainInput() if self._kind == "custom" and not is_plain else None
        self.names: dict[str, str] = {}
        """The names that its item has."""
        if self._kind in ("function", "custom"):
            self.names["name"] = name if tool is None else tool.name
            if tool is not None and tool.namespace is not None:
                self.names["namespace"] = tool.namespace

    @property
    def item_type(self) -> str:
        """The type of its item."""
        return self._form.item_type

    @property
    def id_prefix(self) -> str:
        """What its item's id begins with."""
        return self._form.id_prefix

    @property
    def told_as(self) -> str | None:
        """Name of the events that tell of its arguments; None: they are told whole."""
        return self._form.told_as

    def feed(self, text: str) -> str:
        """Take the next piece of the arguments; return the next piece of what the item holds of them."""
        return text if self._input is None else self._input.feed(text)

    def end(self) -> str:
        """Return the last piece."""
        return "" if self._input is None else self._input.end()

    def content(self, text: str) -> dict[str, Any]:
        """Return the field of the item that holds the arguments, of which `text` is known."""
        always = self._form.always
        return {self._form.field: text if always is None else {**always, **call_arguments(text)}}


def function_of(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the function that the item of a call calls, as the chat API has it."""
    kind = CALL_ITEMS[str(item["type"])]
    form = _FORMS[kind]
    name = joined_name(item.get("namespace"), str(item.get("name") or kind))
    given = item.get(form.field)
    if kind == "function" and isinstance(given, str):
        return {"name": name, "arguments": given}
    if kind == "custom":
        return {"name": name, "arguments": orjson.dumps({INPUT: str(given or "")}).decode()}
    written = given if isinstance(given, dict) else {}
    always = form.always or {}
    known = {key: value for key, value in written.items() if value is not None and always.get(key) != value}
    return {"name": name, "arguments": orjson.dumps(known).decode()}
