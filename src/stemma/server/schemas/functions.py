"""OpenAI's older words for tools, `functions`, in terms of the newer ones and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tool_request(body: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's body with its `functions` as `tools` too; at most one is called."""
    functions, choice = body.get("functions"), body.get("function_call")
    if not isinstance(functions, list) or not functions or body.get("tools"):
        return body
    found = {**body, "tools": [{"type": "function", "function": one} for one in functions]}
    found["parallel_tool_calls"] = False
    if choice is not None:
        is_named = isinstance(choice, dict)
        found["tool_choice"] = {"type": "function", "function": choice} if is_named else choice
    return found


def tool_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its `function_call`, or its role `function`, in the newer words.

    Calls have no ids there: the name stands for it.
    """
    if message.get("role") == "function":
        return {**message, "role": "tool", "tool_call_id": _id(message)}
    call = message.get("function_call")
    if not isinstance(call, dict):
        return message
    rest = {name: value for name, value in message.items() if name != "function_call"}
    if message.get("tool_calls"):
        return rest
    return {**rest, "tool_calls": [{"id": _id(call), "type": "function", "function": call}]}


def _id(named: Mapping[str, Any]) -> str:
    return f"function_{named.get('name')}"


def in_function_words(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice of an answer, whole or a chunk's, with its call in the older words."""
    found = dict(choice)
    for name in ("message", "delta"):
        if calls := choice.get(name, {}).get("tool_calls"):
            rest = {key: value for key, value in choice[name].items() if key != "tool_calls"}
            found[name] = {**rest, "function_call": calls[0]["function"]}
    if choice.get("finish_reason") == "tool_calls":
        found["finish_reason"] = "function_call"
    return found
