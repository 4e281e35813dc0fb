"""`/dashboard`: the operator's page. Its files hold no data and need no key; what they ask for does.

The key is typed into the page, kept for the tab (`sessionStorage`) and sent as ``Authorization`` by `fetch`:
there is no cookie that another site could use. The policy lets nothing load from elsewhere and no inline
script run; plotly writes style elements, so inline styles are allowed.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.util import find_spec

from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import NotFound
from stemma.server.errors import openai_error
from stemma.server.routes import PUBLIC, Router

router = Router(openai_error)
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FILES = frozenset({"style.css", "app.js", "charts.js", "tree.js", "feed.js"})
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
NO_PLOTLY = "charts need plotly: pip install 'stemma[dashboard]'"


@router.get("/dashboard", PUBLIC)
async def page(request: Request) -> Response:
    """The page itself."""
    return _asset("index.html")


@router.get("/dashboard/{name}", PUBLIC)
async def asset(request: Request) -> Response:
    """Its style, its scripts, and plotly's script out of the installed package."""
    name = request.path_params["name"]
    if name == "plotly.js":
        if find_spec("plotly") is None:
            raise NotFound(NO_PLOTLY)
        return _answer(_plotly(), "js")
    if name not in _FILES:
        raise NotFound("no such file of the dashboard")
    return _asset(name)


def _asset(name: str) -> Response:
    return _answer(_read(name), name.rpartition(".")[2])


def _answer(content: bytes, kind: str) -> Response:
    return Response(content, headers=_HEADERS, media_type=f"{_TYPES[kind]}; charset=utf-8")


@cache
def _read(name: str) -> bytes:
    return (files("stemma.insight.page") / name).read_bytes()


@cache
def _plotly() -> bytes:
    return (files("plotly.package_data") / "plotly.min.js").read_bytes()
