"""The OpenAPI document: FastAPI's, with the bodies that our own code reads (`body.py`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from stemma.server.access import BYTES_TYPE, JSON_TYPE
from stemma.server.errors import json_response, openai_error
from stemma.server.routes import PUBLIC, Router

_REF = "#/components/schemas/{model}"
_PATH_PARAMETER = re.compile(r"\{(\w+)\}")
_bodies: dict[str, type[BaseModel]] = {}
"""Every model that some endpoint takes."""
_ERRORS: Mapping[str, str] = {
    "400": "A field doesn't fit; the error names it",
    "401": "The key is missing or wrong",
    "403": "Not for this peer, host or origin",
    "404": "Unknown model or path",
    "408": "It took too long",
    "413": "The body is too large",
    "415": "The body isn't declared as what it must be",
    "422": "A field doesn't fit (TGI's shape)",
    "424": "The engine failed on it (TGI's shape)",
    "429": "The queue is full",
    "500": "The engine failed on it",
    "503": "Busy, draining, or failed",
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


def parameter(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `openapi_extra` of an endpoint that reads one parameter of the query."""
    return {"parameters": [{"name": name, "in": "query", "required": False, "schema": dict(schema)}]}


document_router = Router(openai_error)


@document_router.get("/openapi.json", PUBLIC, include_in_schema=False)
async def document(request: Request) -> Response:
    """The document."""
    return json_response(request.app.openapi())


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the document, made once."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, made = models_json_schema([(model, "validation") for model in _bodies.values()], ref_template=_REF)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(made.get("$defs", {}))
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    answered = {text: {"description": what} for text, what in _ERRORS.items()}
    for route in routes:
        in_path = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PATH_PARAMETER.findall(route.path_format)
        ]
        for method in route.methods or ():
            operation = document["paths"].get(route.path_format, {}).get(method.lower())
            if operation is not None:
                operation["parameters"] = [*operation.get("parameters", ()), *in_path]
                operation["responses"] = {"200": {"description": "Done"}} | answered
                operation["security"] = [{}, {"key": []}]
    app.openapi_schema = document
    return document
