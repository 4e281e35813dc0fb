"""`/dashboard`: the operator's page. Its files hold no data and need no key; what they ask for does.

The key is typed into the page, kept for the tab (`sessionStorage`) and sent as ``Authorization`` by `fetch`:
there is no cookie that another site could use.
"""

from __future__ import annotations

from importlib.util import find_spec

from starlette.requests import Request
from starlette.responses import Response

from stemma.errors import NotFound
from stemma.server.errors import openai_error
from stemma.server.routes import PUBLIC, Router
from stemma.server.web.assets import asset

router = Router(openai_error)
_PAGES = "stemma.insight.page"
_FILES = frozenset({"style.css", "app.js", "charts.js", "tree.js", "feed.js", "elements.js", "explained.js"})
NO_PLOTLY = "charts need plotly: pip install 'stemma-llm[dashboard]'"


@router.get("/dashboard", PUBLIC, sends=("text/html",))
async def page(request: Request) -> Response:
    """The page itself."""
    return asset(_PAGES, "index.html")


@router.get("/dashboard/{name}", PUBLIC, sends=("text/css", "text/javascript"))
async def page_file(request: Request) -> Response:
    """Its style, its scripts, and plotly's script out of the installed package."""
    name = request.path_params["name"]
    if name == "plotly.js":
        if find_spec("plotly") is None:
            raise NotFound(NO_PLOTLY)
        return asset("plotly.package_data", "plotly.min.js")
    if name not in _FILES:
        raise NotFound("no such file of the dashboard")
    return asset(_PAGES, name)
