"""``/v1/conversations``: OpenAI's named conversations, which responses go on from and add to."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import InvalidRequest, NotFound
from stemma.server.apis.pages import item_page, place_of
from stemma.server.apis.responses.items import chat_messages
from stemma.server.apis.responses.listing import whole_items
from stemma.server.apis.responses.output import new_id
from stemma.server.apis.responses.store import Item, StoredConversation, Stores, stores_of
from stemma.server.door.access import owner_of
from stemma.server.door.answer_memory import PARSED_BYTES
from stemma.server.door.entry import hold
from stemma.server.errors import json_response, openai_error
from stemma.server.openapi import takes
from stemma.server.routes import TENANT, Router
from stemma.server.schemas.bounds import MAX_MESSAGES
from stemma.server.schemas.responses import ConversationItems, ConversationRequest
from stemma.server.turn.body import read_object, validate
from stemma.types import TokenArray

router = Router(openai_error)


@router.post("/v1/conversations", TENANT, openapi_extra=takes(ConversationRequest))
async def create(request: Request) -> Response:
    """Begin a conversation, with items or empty."""
    stores = stores_of(request)
    body = validate(ConversationRequest, await read_object(request))
    if stores.conversations.capacity == 0:
        raise InvalidRequest("this server stores no conversations (max_responses)")
    items = _checked(request, body.items or [])
    entry = StoredConversation(int(time.time()), orjson.dumps(body.metadata or {}), orjson.dumps(items))
    conversation_id = new_id("conv")
    _put(stores, request, conversation_id, entry)
    return _answer(conversation_id, entry)


@router.get("/v1/conversations/{conversation_id}", TENANT, metered=True)
async def get(request: Request, conversation_id: str) -> Response:
    """Return when a conversation began, and its metadata."""
    return _answer(conversation_id, _found(stores_of(request), request, conversation_id))


@router.post("/v1/conversations/{conversation_id}", TENANT, openapi_extra=takes(ConversationRequest))
async def update(request: Request, conversation_id: str) -> Response:
    """Replace a conversation's metadata."""
    stores = stores_of(request)
    body = validate(ConversationRequest, await read_object(request))
    entry = _found(stores, request, conversation_id)
    entry = replace(entry, metadata=orjson.dumps(body.metadata or {}))
    _put(stores, request, conversation_id, entry)
    return _answer(conversation_id, entry)


@router.delete("/v1/conversations/{conversation_id}", TENANT)
async def delete(request: Request, conversation_id: str) -> Response:
    """Drop a conversation. Responses that were part of it are kept."""
    stores = stores_of(request)
    if not stores.conversations.delete(owner_of(request), conversation_id):
        raise _missing(conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post("/v1/conversations/{conversation_id}/items", TENANT, openapi_extra=takes(ConversationItems))
async def add_items(request: Request, conversation_id: str) -> Response:
    """Add items at the end of a conversation."""
    stores = stores_of(request)
    body = validate(ConversationItems, await read_object(request))
    added = _checked(request, body.items)
    earlier = _found(stores, request, conversation_id).item_list
    hold(request, "conversation_id", PARSED_BYTES * len(earlier))
    add_turn(stores, owner_of(request), conversation_id, added, None)
    return json_response(
        {
            "object": "list",
            "data": added,
            "first_id": added[0]["id"],
            "last_id": added[-1]["id"],
            "has_more": False,
        }
    )


@router.get("/v1/conversations/{conversation_id}/items", TENANT, metered=True)
async def list_items(request: Request, conversation_id: str) -> Response:
    """List a conversation's items, the newest first unless ``order=asc``."""
    return json_response(item_page(_items(request, conversation_id), request))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}", TENANT, metered=True)
async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Return one item."""
    items = _items(request, conversation_id)
    return json_response(items[place_of(items, item_id)])


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", TENANT, metered=True)
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Take one item out of a conversation."""
    stores = stores_of(request)
    entry, items = _found(stores, request, conversation_id), _items(request, conversation_id)
    del items[place_of(items, item_id)]
    _put(stores, request, conversation_id, replace(entry, item_list=orjson.dumps(items)))
    return _answer(conversation_id, entry)


def conversation_of(stores: Stores, owner: str, conversation_id: str) -> StoredConversation:
    """Return what a response goes on from. Raises InvalidRequest if the owner has no such conversation."""
    found = stores.conversations.get(owner, conversation_id)
    if found is None:
        raise InvalidRequest(str(_missing(conversation_id)), param="conversation")
    return found


def add_turn(
    stores: Stores,
    owner: str,
    conversation_id: str,
    items: list[Item],
    token_ids: TokenArray | None,
) -> None:
    """Add items at the end, after those that others have added meanwhile.

    `token_ids`: the conversation as the engine now holds it; None: as before. Raises NotFound, InvalidRequest
    if it grows too long.
    """
    entry = stores.conversations.get(owner, conversation_id)
    if entry is None:
        raise _missing(conversation_id)
    grown = [*entry.items(), *items]
    if len(grown) > MAX_MESSAGES:
        raise InvalidRequest(f"a conversation holds at most {MAX_MESSAGES} items", param="items")
    tokens = entry.token_ids if token_ids is None else token_ids
    entry = replace(entry, item_list=orjson.dumps(grown), token_ids=tokens)
    if not stores.conversations.put(owner, conversation_id, entry):
        raise InvalidRequest("the conversation is too large to be stored", param="items")


def _checked(request: Request, given: list[Item]) -> list[Item]:
    """Return the items as they are kept. Raises InvalidRequest for those that no chat can hold."""
    hold(request, "items", PARSED_BYTES * len(orjson.dumps(given)))
    items = whole_items(given)
    chat_messages(items)
    return items


def _found(stores: Stores, request: Request, conversation_id: str) -> StoredConversation:
    found = stores.conversations.get(owner_of(request), conversation_id)
    if found is None:
        raise _missing(conversation_id)
    return found


def _items(request: Request, conversation_id: str) -> list[Item]:
    """Return a conversation's items, within the memory of answers."""
    entry = _found(stores_of(request), request, conversation_id)
    hold(request, "conversation_id", PARSED_BYTES * len(entry.item_list))
    return entry.items()


def _put(stores: Stores, request: Request, conversation_id: str, entry: StoredConversation) -> None:
    if not stores.conversations.put(owner_of(request), conversation_id, entry):
        raise InvalidRequest("the conversation is too large to be stored", param="items")


def _missing(conversation_id: str) -> NotFound:
    return NotFound(f"there is no conversation {conversation_id[:64]!r}, or its time is over")


def _answer(conversation_id: str, entry: StoredConversation) -> Response:
    shown: dict[str, Any] = {
        "id": conversation_id,
        "object": "conversation",
        "created_at": entry.created_at,
        "metadata": orjson.loads(entry.metadata),
    }
    return json_response(shown)
