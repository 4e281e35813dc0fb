"""Lists in pages, as OpenAI's API gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from stemma.errors import InvalidRequest, NotFound

MAX_LISTED = 100
_DEFAULT_LISTED = 20


def item_page(items: Sequence[Mapping[str, Any]], request: Request) -> dict[str, Any]:
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


def place_of(items: Sequence[Mapping[str, Any]], item_id: str) -> int:
    """Return the position of the item with this id. Raises NotFound."""
    for place, item in enumerate(items):
        if item.get("id") == item_id:
            return place
    raise NotFound(f"there is no item {item_id[:64]!r}")
