"""``/v1/files``: OpenAI's, for the requests and results of batches."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO
from uuid import uuid4

from python_multipart.exceptions import MultipartParseError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from stemma.budgets import Budget
from stemma.errors import InvalidRequest, WrongMediaType
from stemma.server.apis.pages import item_page
from stemma.server.door.access import FORM_TYPE, owner_of
from stemma.server.door.caller import caller
from stemma.server.errors import json_response, openai_error
from stemma.server.openapi import takes_form
from stemma.server.routes import TENANT, Router
from stemma.server.transport.incoming import limited_chunks
from stemma_batch.batches import Batches
from stemma_batch.records import BATCH_PURPOSE, StoredFile
from stemma_batch.run import KEPT_S
from stemma_batch.store import BatchStore

router = Router(openai_error)
upload_router = Router(openai_error, media_type=FORM_TYPE)

LINES_TYPE = "application/jsonl"
_MAX_FIELDS = 8
_FORM_BYTES = 64 * 1024
"""Bytes of a form beside its file."""
_MAX_FIELD_BYTES = 1024
_MAX_NAME_CHARS = 255
_SHORTEST_S, _LONGEST_S = 3600, 30 * 24 * 3600


def batches_of(request: Request) -> Batches:
    """Return the batches of the app that serves `request`. Raises InvalidRequest if it keeps none."""
    batches: Batches | None = request.app.state.batches
    if batches is None:
        raise InvalidRequest("this server keeps no files and batches: start it with --batch-directory DIR")
    return batches


@upload_router.post("/v1/files", TENANT, openapi_extra=takes_form("purpose", "file"))
async def upload(request: Request) -> Response:
    """Keep a file of requests, one JSON object a line."""
    batches = batches_of(request)
    async with _form(request, batches.budget) as form:
        return await _kept(batches, owner_of(request), form)


async def _kept(batches: Batches, owner: str, form: FormData) -> Response:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequest("the form has no file", param="file")
    if form.get("purpose") != BATCH_PURPOSE:
        raise InvalidRequest(f"purpose must be {BATCH_PURPOSE}; others have no use here", param="purpose")
    now = int(time.time())
    kept = StoredFile(
        f"file-{uuid4().hex}",
        owner,
        (file.filename or "")[:_MAX_NAME_CHARS],
        BATCH_PURPOSE,
        file.size or 0,
        now,
        now + _kept_s(form),
    )
    source = file.file

    def keep(store: BatchStore) -> None:
        path = store.path_of(kept.file_id)
        try:
            _copy(source, path.open("xb"))
            store.add_file(kept)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    await batches.storage.call(keep)
    return json_response(kept.shown())


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    with target:
        source.seek(0)
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())


def _kept_s(form: FormData) -> int:
    given = form.get("expires_after[seconds]")
    if given is None:
        return KEPT_S
    is_number = isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 10
    if not is_number or not _SHORTEST_S <= int(str(given)) <= _LONGEST_S:
        raise InvalidRequest(
            f"expires_after[seconds] must be between {_SHORTEST_S} and {_LONGEST_S}", param="expires_after"
        )
    return int(str(given))


@asynccontextmanager
async def _form(request: Request, budget: Budget) -> AsyncIterator[FormData]:
    """Read a body of multipart/form-data; its file lies on disk until the context ends."""
    if not request.headers.get("content-type", "").lower().startswith(FORM_TYPE):
        raise WrongMediaType(f"send the file as {FORM_TYPE}, with the fields purpose and file")

    owner = owner_of(request)

    async def stream() -> AsyncGenerator[bytes, None]:
        async for chunk in limited_chunks(request, budget.most(owner) + _FORM_BYTES):
            # Until the file is kept, which takes its bytes anew: uploads under way fill no disk.
            caller().holding.take(budget, len(chunk), owner)
            yield chunk

    parser = MultiPartParser(
        request.headers, stream(), max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
    )
    try:
        form = await parser.parse()
    except (MultiPartException, MultipartParseError) as error:
        raise InvalidRequest(f"the form can't be read: {error}") from error
    caller().holding.close()
    try:
        yield form
    finally:
        await form.close()


@router.get("/v1/files", TENANT)
async def list_files(request: Request) -> Response:
    """List the files of whoever asks, page by page."""
    owner, purpose = owner_of(request), request.query_params.get("purpose")
    files = await batches_of(request).storage.call(lambda store: store.list_files(owner, purpose))
    return json_response(item_page([file.shown() for file in files], request))


@router.get("/v1/files/{file_id}", TENANT)
async def show(request: Request, file_id: str) -> Response:
    """Return a file's facts."""
    return json_response((await _found(request, file_id)).shown())


@router.get("/v1/files/{file_id}/content", TENANT, sends=(LINES_TYPE,), metered=True)
async def content(request: Request, file_id: str) -> Response:
    """Return a file's bytes."""
    file = await _found(request, file_id)
    path = batches_of(request).storage.store.path_of(file.file_id)
    return FileResponse(path, media_type=LINES_TYPE)


@router.delete("/v1/files/{file_id}", TENANT)
async def delete(request: Request, file_id: str) -> Response:
    """Drop a file; an open batch that reads it fails."""
    owner = owner_of(request)
    await batches_of(request).storage.call(lambda store: store.delete_file(owner, file_id))
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def _found(request: Request, file_id: str) -> StoredFile:
    owner = owner_of(request)
    return await batches_of(request).storage.call(lambda store: store.file(owner, file_id))
