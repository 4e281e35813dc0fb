"""Calls of the server's own endpoints without a connection: how the lines of a batch are answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import uuid4

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from stemma.budgets import Holding
from stemma.errors import StemmaError, Unauthorized
from stemma.server.door.access import Access
from stemma.server.door.caller import Caller, begin_call
from stemma.server.door.entry import counted_in
from stemma.server.door.keyfile import Tenant
from stemma.server.errors import json_response, openai_body, openai_error
from stemma_batch.records import BatchUsage

logger = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Answered:
    """An endpoint's answer."""

    request_id: str
    status: int
    body: bytes
    retry_after_s: float
    usage: BatchUsage
    holding: Holding
    """What it has taken of the budgets, until it is closed."""

    def close(self) -> None:
        """Give back what it has taken."""
        self.holding.close()

    @property
    def is_busy(self) -> bool:
        """Whether the same call is worth a retry."""
        return self.status in (429, 503, 529)

    def record(self, custom_id: str) -> bytes:
        """Return the line of OpenAI's output file."""
        response = {
            "status_code": self.status,
            "request_id": self.request_id,
            "body": orjson.Fragment(self.body),
        }
        return record_of(custom_id, response, None)


def record_of(custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
    """Return a line of OpenAI's output file, or of its file of errors."""
    return orjson.dumps(
        {
            "id": f"batch_req_{uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )


class LocalCalls:
    """The endpoints that batches may name, by path; their errors are OpenAI's."""

    def __init__(self, app: FastAPI, access: Access, handlers: Mapping[str, Handler]) -> None:
        self._app = app
        self._access = access
        self._handlers = handlers

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the endpoints."""
        return tuple(self._handlers)

    async def answer(self, path: str, body: bytes, owner: str) -> Answered:
        """Call an endpoint for `owner`, in a task of its own. Never raises but for being cancelled.

        Whoever gets the answer closes it.
        """
        request_id = f"req_{uuid4().hex}"
        return await asyncio.create_task(self._answered(path, body, owner, request_id))

    async def _answered(self, path: str, body: bytes, owner: str, request_id: str) -> Answered:
        caller = Caller(request_id, owner)
        begin_call(caller)
        try:
            request = self._request(path, body, owner)
            with counted_in(request):
                response = await self._handlers[path](request)
        except StemmaError as error:
            response = openai_error(error)
        except Exception:
            logger.exception("a batch's request failed")
            response = json_response(openai_body("internal error", "server_error"), 500)
        except BaseException:
            caller.holding.close()
            raise
        retry_after_s = float(response.headers.get("retry-after", 1))
        used = caller.used
        usage = BatchUsage(used.num_prompt_tokens, used.num_cached_tokens, used.num_generated_tokens)
        body = bytes(response.body)
        return Answered(request_id, response.status_code, body, retry_after_s, usage, caller.holding)

    def _request(self, path: str, body: bytes, owner: str) -> Request:
        """Return a request with `body` whose client never leaves."""
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            if (message := next(messages, None)) is not None:
                return message
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "app": self._app,
            "state": {} if not owner else {"tenant": self._tenant(owner)},
        }
        return Request(scope, receive)

    def _tenant(self, name: str) -> Tenant:
        """Return the tenant as the file of keys has it now. Raises Unauthorized if it is gone."""
        tenants = () if self._access.keys is None else self._access.keys.tenants
        found = next((one for one in tenants if one.name == name), None)
        if found is None:
            raise Unauthorized(f"the tenant {name} that sent the batch has no key any more")
        return found
