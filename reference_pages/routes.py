"""The page of HTTP, from the routes and from the OpenAPI document's schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import groupby
from typing import Any

from fastapi import FastAPI

from reference_pages.markdown import prose, table
from reference_pages.schemas import kind
from stemma import __version__
from stemma.server.app import all_routers
from stemma.server.openapi import describe
from stemma.server.routes import AudienceRoute

_HEAD = """# HTTP

Who may ask: **public**: everybody; **tenant**: who has an API key, where there are keys; **operator of
tenants**: sums over all clients, so with tenants who has the admin key; **operator**: who has the admin key,
or without one programs on this machine. `GET /openapi.json` is the same as a document, `/docs` a page.
"""
_BODIES = """
## Bodies

Fields that aren't named here are ignored, or refused by name where they would change the answer.
"""
_REF = "#/components/schemas/"


def page() -> str:
    """Return the page: routes by the module that has them, then the fields of bodies."""
    parts = [_HEAD]
    for module, group in groupby(routes(), key=lambda one: one.endpoint.__module__):
        title = prose(import_module(module).__doc__).partition(". ")[0].rstrip(".")
        rows = [_row(one) for one in group]
        parts.append(f"\n## {title}\n\n{table(('route', 'who', '', 'body'), rows)}")
    parts.append(_BODIES)
    schemas = document()["components"]["schemas"]
    bodies = dict.fromkeys(name for one in routes() for name in body_names(one))
    parts += [f"\n### {name}\n\n{_fields(schemas[name])}" for name in bodies]
    return "".join(parts)


def routes() -> list[AudienceRoute]:
    """Return every route of a server."""
    return [one for router in all_routers() for one in router.routes if isinstance(one, AudienceRoute)]


def document() -> dict[str, Any]:
    """Return the OpenAPI document of a server."""
    return describe(FastAPI(title="Stemma", version=__version__), routes())


def body_names(route: AudienceRoute) -> Iterator[str]:
    """Yield the names of the schemas that a route's JSON body may have."""
    content = (route.openapi_extra or {}).get("requestBody", {}).get("content", {})
    for media in content.values():
        schema: Mapping[str, Any] = media["schema"]
        for one in schema.get("anyOf", [schema]):
            if (ref := str(one.get("$ref", ""))).startswith(_REF):
                yield ref.removeprefix(_REF)


def _row(one: AudienceRoute) -> tuple[str, str, str, str]:
    methods = " ".join(sorted(one.methods or ()))
    bodies = ", ".join(f"[{name}](#{name.lower()})" for name in body_names(one))
    return f"`{methods} {one.path}`", one.audience.value, prose(one.description), bodies


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", [])
    rows = (
        (f"`{name}`", kind(field), "must be there" if name in required else "")
        for name, field in schema.get("properties", {}).items()
    )
    return table(("field", "", ""), rows)
