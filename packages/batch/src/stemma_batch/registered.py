"""What the entry point ``stemma.apis`` names."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI

from stemma.server.apis import embeddings, openai_chat, openai_completions
from stemma.server.apis.responses import api as responses
from stemma.server.guest_apis import GuestApi
from stemma.server.operator.context import OperatorContext
from stemma_batch import batches_api, files_api
from stemma_batch.batches import Batches
from stemma_batch.calls import Handler, LocalCalls

BATCH_ENDPOINTS: dict[str, Handler] = {
    "/v1/chat/completions": openai_chat.create_chat_completion,
    "/v1/completions": openai_completions.create_completion,
    "/v1/embeddings": embeddings.create_embeddings,
    "/v1/responses": responses.create_response,
}
"""Endpoints that a batch may name."""


def begin(app: FastAPI) -> AbstractAsyncContextManager[None] | None:
    """Leave the batches in `app.state.batches`, None without a directory. Raises StorageError."""
    context: OperatorContext = app.state.operator
    app.state.batches = batches = Batches.of(
        context.settings.server,
        LocalCalls(app, context.access, BATCH_ENDPOINTS),
        context.engine,
        context.lifecycle,
        context.admission,
        context.instruments.metrics,
    )
    return None if batches is None else batches.running()


API = GuestApi((files_api.upload_router, files_api.router, batches_api.router), begin=begin)
