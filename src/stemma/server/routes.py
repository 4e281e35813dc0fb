"""Routes: each says where it is made who may see it, and in which shape its errors are.

A handler just raises; its route catches `StemmaError` and answers in the shape of its API. Anything else is a
bug: it is logged and answered with 500 (`app.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from enum import StrEnum
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute

from stemma.errors import ClientDisconnected, StemmaError
from stemma.server.door.access import JSON_TYPE, access_of
from stemma.server.door.entry import counted_in
from stemma.server.errors import STATUS_CLIENT_CLOSED, ErrorShape
from stemma.server.transport.headers import IS_HEAD

EVENTS_TYPE, TEXT_TYPE = "text/event-stream", "text/plain"
Handler = Callable[..., Awaitable[Response]]


class Audience(StrEnum):
    """Who may see what a route answers."""

    PUBLIC = "public"
    """Everybody: it is no secret, and says nothing of requests."""
    TENANT = "tenant"
    """Who has an API key, where there are keys. It shows what belongs to that tenant, or to the model."""
    SUMS = "operator of tenants"
    """Sums over all clients. With tenants only the operator may see them, for they tell each of the others;
    without, who has the API key."""
    OPERATOR = "operator"
    """Who administers the server."""

    @property
    def is_operators(self) -> bool:
        """Whether no tenant may see it."""
        return self in (Audience.SUMS, Audience.OPERATOR)


PUBLIC, TENANT, SUMS, OPERATOR = Audience.PUBLIC, Audience.TENANT, Audience.SUMS, Audience.OPERATOR


class Router(APIRouter):
    """The routes of one part of the server. A route without an audience can't be made."""

    def __init__(
        self,
        shape: ErrorShape,
        *,
        prefix: str = "",
        media_type: str = JSON_TYPE,
        other_shapes: tuple[ErrorShape, ...] = (),
    ) -> None:
        """`shape` makes the response of an error; `media_type` is that of bodies.

        `other_shapes`: those that its handlers answer with by themselves, for the OpenAPI document.
        """
        super().__init__(prefix=prefix)
        self._shapes = (shape, *other_shapes)
        self._media_type = media_type

    def get(self, path: str, audience: Audience, **options: Any) -> Callable[[Handler], Handler]:  # type: ignore[override]
        """Make a route for GET, and for HEAD, which is answered as GET is.

        Of `options`, `sends` names the types of its answers where they aren't JSON alone; `metered`: it
        counts as one of a tenant's requests, as every POST does that doesn't end something.
        """
        return self._made(path, "GET", audience, options)

    def post(self, path: str, audience: Audience, **options: Any) -> Callable[[Handler], Handler]:  # type: ignore[override]
        """Make a route for POST."""
        return self._made(path, "POST", audience, options)

    def delete(self, path: str, audience: Audience, **options: Any) -> Callable[[Handler], Handler]:  # type: ignore[override]
        """Make a route for DELETE."""
        return self._made(path, "DELETE", audience, options)

    def _made(
        self, path: str, method: str, audience: Audience, options: dict[str, Any]
    ) -> Callable[[Handler], Handler]:
        shapes, media_type = self._shapes, self._media_type
        has_head = bool(options.pop("has_head", True)) and method == "GET"
        sends = tuple(options.pop("sends", (JSON_TYPE,)))
        is_metered = bool(options.pop("metered", method == "POST")) and audience is Audience.TENANT

        class Route(AudienceRoute):
            pass

        Route.audience, Route.shapes, Route.media_type = audience, shapes, media_type
        Route.has_head, Route.sends, Route.is_metered = has_head, sends, is_metered

        def add(handler: Handler) -> Handler:
            # FastAPI keeps the class of a route where it includes a router into another.
            self.add_api_route(path, handler, methods=[method], route_class_override=Route, **options)
            return handler

        return add


def tell_refusal(request: Request, error: StemmaError, route: str, status: int) -> None:
    """Tell whoever notes refusals in the app that serves `request`; proxies have none."""
    if (refusals := getattr(request.app.state, "refusals", None)) is not None:
        refusals.note(request, error, route, status)


class AudienceRoute(APIRoute):
    """A route that checks who asks before its handler runs; made by `Router`."""

    audience: Audience
    shapes: tuple[ErrorShape, ...]
    """Shapes of its errors: that of its API first, then those that the handler writes."""
    media_type: str
    has_head: bool
    sends: tuple[str, ...]
    """Types of what it answers where it succeeds, for the OpenAPI document; none: it may be empty."""
    is_metered: bool
    """Whether it counts as one of its tenant's requests: all that make the server work or read do."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return the handler, guarded."""
        handler, shape = super().get_route_handler(), self.shapes[0]

        async def guarded(request: Request) -> Response:
            is_head = bool(request.scope.get(IS_HEAD))
            if is_head and not self.has_head:
                raise HTTPException(405, headers={"Allow": ", ".join(self.methods or ())})
            try:
                self.check(request)
                with counted_in(request) if self.is_metered else nullcontext():
                    response = await handler(request)
            except ClientDisconnected:
                return Response(status_code=STATUS_CLIENT_CLOSED)
            except StemmaError as error:
                response = shape(error)
                tell_refusal(request, error, self.path, response.status_code)
                return response
            return response if not is_head else await _head_of(response)

        return guarded

    def check(self, request: Request) -> None:
        """Raise unless whoever sent `request` belongs to the audience."""
        access = access_of(request)
        if self.audience is Audience.OPERATOR or (self.audience.is_operators and access.keys is not None):
            access.check_admin(request, self.media_type)
        elif self.audience is not Audience.PUBLIC:
            access.check(request, self.media_type)


async def _head_of(response: Response) -> Response:
    """Return the head alone of what may be a stream without an end."""
    if isinstance(response, StreamingResponse) or not hasattr(response, "body"):
        if (close := getattr(response, "aclose", None)) is not None:
            await close()
        return Response(status_code=response.status_code, headers=dict(response.headers))
    return response


def without_audience(routes: Iterable[BaseRoute]) -> list[str]:
    """Return the paths of routes that nobody declared an audience for."""
    return [str(getattr(each, "path", each)) for each in routes if not isinstance(each, AudienceRoute)]
