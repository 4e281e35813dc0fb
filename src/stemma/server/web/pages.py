"""The chat at `/` and the API's description at `/docs`. Their files hold no data and need no key."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import NotFound
from stemma.server.errors import openai_error
from stemma.server.routes import PUBLIC, Router
from stemma.server.web.assets import asset

router = Router(openai_error)
_PAGES = "stemma.insight.page"
_SWAGGER = "fastapi_offline"
_FILES = {
    **{f"/chat/{one.name}": (_PAGES, f"chat/{one.name}") for one in files(_PAGES).joinpath("chat").iterdir()},
    **{f"/chat/{name}": (_PAGES, name) for name in ("style.css", "elements.js", "explained.js")},
    "/docs/docs.js": (_PAGES, "docs.js"),
    "/docs/swagger-ui.js": (_SWAGGER, "static/swagger-ui-bundle.js"),
    "/docs/swagger-ui.css": (_SWAGGER, "static/swagger-ui.css"),
}
"""Path -> package and file."""


@router.get("/", PUBLIC, sends=("text/html",))
async def chat_page(request: Request) -> Response:
    """A page to chat on, which shows what each turn reused."""
    return asset(_PAGES, "chat/chat.html")


@router.get("/docs", PUBLIC, sends=("text/html",))
async def docs_page(request: Request) -> Response:
    """The API's description, to read and to try; nothing in it comes from another host."""
    return asset(_PAGES, "docs.html")


@router.get("/chat/{name}", PUBLIC, sends=("text/css", "text/javascript"))
@router.get("/docs/{name}", PUBLIC, sends=("text/css", "text/javascript"))
async def page_file(request: Request, name: str) -> Response:
    """Their styles and scripts."""
    found = _FILES.get(request.url.path)
    if found is None:
        raise NotFound("no such file of a page")
    return asset(*found)
