"""The OpenAPI document: FastAPI's, with the bodies that our own code reads (`body.py`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from stemma.errors import InvalidRequest
from stemma.server.door.access import BYTES_TYPE, FORM_TYPE, JSON_TYPE
from stemma.server.errors import anthropic_error, json_response, openai_error, tgi_error
from stemma.server.routes import PUBLIC, AudienceRoute, Router

_REF = "#/components/schemas/{model}"
_PATH_PARAMETER = re.compile(r"\{(\w+)\}")
_bodies: dict[str, type[BaseModel]] = {}
"""Every model that some endpoint takes."""
_ERRORS: Mapping[str, str] = {
    "400": "A field doesn't fit; the error names it",
    "401": "The key is missing or wrong",
    "403": "Not for this peer, host or origin",
    "405": "Not with this method",
    "409": "It contradicts what is there already",
    "404": "Unknown model or path",
    "408": "It took too long",
    "413": "The body is too large",
    "415": "The body isn't declared as what it must be",
    "422": "A field doesn't fit (TGI's shape)",
    "424": "The engine failed on it (TGI's shape)",
    "429": "The queue is full",
    "500": "The engine failed on it",
    "503": "Busy, draining, or failed",
    "529": "The queue is full (Anthropic's shape)",
}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


_TEXT = {"type": "string"}
_ERROR_SCHEMAS: Mapping[str, Any] = {
    openai_error.name: _object(error=_object(message=_TEXT, type=_TEXT)),
    anthropic_error.name: _object(type={"const": "error"}, error=_object(message=_TEXT, type=_TEXT)),
    tgi_error.name: {"type": "object"},
}


def takes(*models: type[BaseModel]) -> dict[str, Any]:
    """Return `openapi_extra` of an endpoint whose JSON body is one of `models`."""
    for model in models:
        _bodies[model.__name__] = model
    refs = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {JSON_TYPE: {"schema": schema}}}}


def takes_file() -> dict[str, Any]:
    """Return `openapi_extra` of an endpoint whose body is a file."""
    content = {BYTES_TYPE: {"schema": {"type": "string", "format": "binary"}}}
    return {"requestBody": {"required": True, "content": content}}


def takes_form(*fields: str) -> dict[str, Any]:
    """Return `openapi_extra` of an endpoint whose body is a form with these fields."""
    content = {FORM_TYPE: {"schema": _object(**dict.fromkeys(fields, _TEXT))}}
    return {"requestBody": {"required": True, "content": content}}


def parameter(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `openapi_extra` of an endpoint that reads one parameter of the query."""
    return {"parameters": [{"name": name, "in": "query", "required": False, "schema": dict(schema)}]}


@dataclass(frozen=True, slots=True)
class QueryNumber:
    """A whole number in the query of an endpoint."""

    name: str
    least: int
    most: int
    default: int

    @property
    def extra(self) -> dict[str, Any]:
        """`openapi_extra` of the endpoint."""
        return parameter(self.name, {"type": "integer", "minimum": self.least, "maximum": self.most})

    def of(self, request: Request) -> int:
        """Return what `request` gives, or the default. Raises InvalidRequest."""
        given = request.query_params.get(self.name, str(self.default))
        is_number = given.isascii() and given.isdecimal() and len(given) <= len(str(self.most))
        if not (is_number and self.least <= int(given) <= self.most):
            message = f"{self.name} must be between {self.least} and {self.most}"
            raise InvalidRequest(message, param=self.name)
        return int(given)


document_router = Router(openai_error)


@document_router.get("/openapi.json", PUBLIC, include_in_schema=False)
async def document(request: Request) -> Response:
    """Return the server's OpenAPI document."""
    return json_response(request.app.openapi())


def _answers(route: AudienceRoute) -> dict[str, Any]:
    """Return what a route may answer, by status."""
    done: dict[str, Any] = {"description": "Done"}
    if route.sends:
        done["content"] = {kind: {"schema": {}} for kind in route.sends}
    names = {shape.name for shape in (*route.shapes, openai_error)}  # the last before a route is known
    schema = {"anyOf": [{"$ref": _REF.format(model=name)} for name in sorted(names)]}
    error = {"content": {JSON_TYPE: {"schema": schema}}}
    return {"200": done} | {status: {"description": what, **error} for status, what in _ERRORS.items()}


def describe(app: FastAPI, routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the document, made once. `routes` are those that the application includes."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, made = models_json_schema([(model, "validation") for model in _bodies.values()], ref_template=_REF)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(made.get("$defs", {}))
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    components["schemas"].update(_ERROR_SCHEMAS)
    for route in routes:
        if not isinstance(route, AudienceRoute):
            continue
        in_path = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PATH_PARAMETER.findall(route.path_format)
        ]
        for method in route.methods or ():
            operation = document["paths"].get(route.path_format, {}).get(method.lower())
            if operation is not None:
                operation["parameters"] = [*operation.get("parameters", ()), *in_path]
                operation["responses"] = _answers(route)
                operation["security"] = [{}, {"key": []}]
    app.openapi_schema = document
    return document
