"""The chat at `/`, the API's description at `/docs`, the operator's page at `/dashboard`.

Their files hold no data and need no key; what they ask for does. A key is typed into the page, kept for the
tab (`sessionStorage`) and sent as ``Authorization`` by `fetch`: no cookie that another site could use.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec

from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import NotFound
from stemma.server.errors import openai_error
from stemma.server.routes import PUBLIC, Router
from stemma.server.web.assets import asset

router = Router(openai_error)
PAGES = "stemma.insight.page"
_SWAGGER = "fastapi_offline"
SHARED = ("style.css", "elements.js", "explained.js", "http.js", "watch.js", "glance.js")
"""Files of several pages; those of routers take them too."""
_DASHBOARD = ("app.js", "charts.js", "requests.js", "tree.js", "tree_list.js")
NO_PLOTLY = "charts need plotly: pip install 'stemma-llm[dashboard]'"
_FILES = {
    "/": (PAGES, "chat/chat.html"),
    "/docs": (PAGES, "docs.html"),
    "/dashboard": (PAGES, "index.html"),
    **{f"/chat/{one.name}": (PAGES, f"chat/{one.name}") for one in files(PAGES).joinpath("chat").iterdir()},
    **{f"/chat/{name}": (PAGES, name) for name in SHARED},
    **{f"/dashboard/{name}": (PAGES, name) for name in (*SHARED, *_DASHBOARD)},
    "/dashboard/plotly.js": ("plotly.package_data", "plotly.min.js"),
    "/docs/docs.js": (PAGES, "docs.js"),
    "/docs/swagger-ui.js": (_SWAGGER, "static/swagger-ui-bundle.js"),
    "/docs/swagger-ui.css": (_SWAGGER, "static/swagger-ui.css"),
}
"""Path -> package and file."""


@router.get("/", PUBLIC, sends=("text/html",))
@router.get("/docs", PUBLIC, sends=("text/html",))
@router.get("/dashboard", PUBLIC, sends=("text/html",))
@router.get("/chat/{name}", PUBLIC, sends=("text/css", "text/javascript"))
@router.get("/docs/{name}", PUBLIC, sends=("text/css", "text/javascript"))
@router.get("/dashboard/{name}", PUBLIC, sends=("text/css", "text/javascript"))
async def page_or_file(request: Request) -> Response:
    """A page, its style or a script of it; plotly's is in a package that may be missing."""
    path = request.url.path
    if (found := _FILES.get(path)) is None:
        raise NotFound("no such file of a page")
    if path.endswith("/plotly.js") and find_spec("plotly") is None:
        raise NotFound(NO_PLOTLY)
    return asset(*found)
