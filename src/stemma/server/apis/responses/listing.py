"""Items as OpenAI lists them: whole, each with an id."""

from __future__ import annotations

from stemma.server.apis.responses.output import new_id
from stemma.server.apis.responses.store import Item

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
}


def whole_items(given: str | list[Item]) -> list[Item]:
    """Return what a request calls `input` as items with a type, an id, and a list of parts in messages."""
    items: list[Item] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_whole(item) for item in items]


def _whole(item: Item) -> Item:
    kind = str(item.get("type", "message"))
    found = {"type": kind, "id": item.get("id") or new_id(_PREFIXES.get(kind, "item")), **item}
    if kind == "message":
        found.setdefault("status", "completed")
        if isinstance(found.get("content"), str):
            part = "output_text" if found.get("role") == "assistant" else "input_text"
            found["content"] = [{"type": part, "text": found["content"]}]
    return found
