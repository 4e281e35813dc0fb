"""Items as OpenAI lists them: whole, each with an id, and page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from stemma.errors import InvalidRequest, NotFound
from stemma.server.apis.responses.output import new_id
from stemma.server.apis.responses.store import Item

MAX_LISTED = 100
_DEFAULT_LISTED = 20
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


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


def item_page(items: Sequence[Item], request: Request) -> dict[str, Any]:
    """Return the page of `items`, oldest first, that `limit`, `order` and `after` of the query ask for.

    Raises InvalidRequest, NotFound for an `after` that isn't there.
    """
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    limit = query.get("limit", str(_DEFAULT_LISTED))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_LISTED:
        raise InvalidRequest(f"limit must be from 1 to {MAX_LISTED}", param="limit")
    listed = list(items) if order == "asc" else list(reversed(items))
    if (after := query.get("after")) is not None:
        listed = listed[place_of(listed, after) + 1 :]
    page = listed[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(listed),
    }


def place_of(items: Sequence[Item], item_id: str) -> int:
    """Return the position of the item with this id. Raises NotFound."""
    for place, item in enumerate(items):
        if item.get("id") == item_id:
            return place
    raise NotFound(f"there is no item {item_id[:64]!r}")
