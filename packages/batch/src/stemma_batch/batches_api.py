"""``/v1/batches``: OpenAI's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from stemma.server.apis.pages import item_page
from stemma.server.door.access import owner_of
from stemma.server.errors import json_response, openai_error
from stemma.server.openapi import takes
from stemma.server.routes import TENANT, Router
from stemma.server.turn.body import read_object, validate
from stemma_batch.files_api import batches_of
from stemma_batch.records import BatchOrder
from stemma_batch.schemas import BatchRequest

router = Router(openai_error)


@router.post("/v1/batches", TENANT, openapi_extra=takes(BatchRequest))
async def create(request: Request) -> Response:
    """Answer the requests of a file when there is room."""
    batches = batches_of(request)
    body = validate(BatchRequest, await read_object(request))
    asked = BatchOrder(
        body.endpoint, body.input_file_id, body.completion_window, body.window_s, body.metadata or {}
    )
    return json_response((await batches.create(owner_of(request), asked)).shown())


@router.get("/v1/batches", TENANT)
async def list_batches(request: Request) -> Response:
    """List the batches of whoever asks, page by page."""
    owner = owner_of(request)
    batches = await batches_of(request).storage.call(lambda store: store.list_batches(owner))
    return json_response(item_page([batch.shown() for batch in batches], request))


@router.get("/v1/batches/{batch_id}", TENANT)
async def show(request: Request, batch_id: str) -> Response:
    """Return a batch as it stands."""
    return json_response((await batches_of(request).batch(owner_of(request), batch_id)).shown())


@router.post("/v1/batches/{batch_id}/cancel", TENANT, metered=False)
async def cancel(request: Request, batch_id: str) -> Response:
    """Begin no more requests of a batch; its files hold what was answered."""
    return json_response((await batches_of(request).cancel(owner_of(request), batch_id)).shown())
