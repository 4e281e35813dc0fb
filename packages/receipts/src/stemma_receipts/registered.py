"""What the entry point ``stemma.apis`` names: the signer of a server, and its public key for everybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import NotFound
from stemma.server.errors import json_response, openai_error
from stemma.server.guest_apis import GuestApi
from stemma.server.operator.context import OperatorContext
from stemma.server.routes import PUBLIC, Router
from stemma_receipts.identity import Identity, computation_of, identity_of

if TYPE_CHECKING:  # imported where a server signs: the others start without it
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

router = Router(openai_error)


@router.get("/v1/receipts/key", PUBLIC)
async def receipts_key(request: Request) -> Response:
    """Return the public key that checks this server's receipts."""
    key: Ed25519PrivateKey | None = getattr(request.app.state, "receipts_key", None)
    if key is None:
        raise NotFound("this server signs no receipts (--receipts)")
    from stemma_receipts.keys import key_id, public_pem

    public = key.public_key()
    return json_response({"keyid": key_id(public), "public_key": public_pem(public).decode()})


def begin(app: FastAPI) -> AbstractAsyncContextManager[None] | None:
    """Let the server sign; None without a key. Raises ConfigError."""
    context: OperatorContext = app.state.operator
    path = context.settings.server.receipts
    if path is None:
        return None
    from stemma_receipts.keys import read_private_key

    computation_of(context.engine.key_space)
    app.state.receipts_key = key = read_private_key(path)
    return _signing(app, context, key)


@asynccontextmanager
async def _signing(app: FastAPI, context: OperatorContext, key: Ed25519PrivateKey) -> AsyncIterator[None]:
    """Sign until it is left. All weights are read beside the first requests."""
    from stemma_receipts.observer import Signer

    engine, settings = context.engine, context.settings.engine

    def identity() -> Identity:
        most = engine.max_model_len
        return identity_of(settings, engine.model_name, engine.tokenizer, engine.key_space, most)

    known = asyncio.ensure_future(asyncio.to_thread(identity))
    app.state.runner.observers.insert(0, Signer(key, known).observer)
    try:
        yield
    finally:
        known.cancel()
        await asyncio.gather(known, return_exceptions=True)


API = GuestApi((router,), begin=begin)
