"""Files of pages, out of installed packages, under a policy that lets nothing load from elsewhere.

No inline script runs; plotly and Swagger UI write style elements, so inline styles are allowed.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def asset(package: str, name: str) -> Response:
    """Return the answer that carries a file of a package. `name` is ours, never a client's."""
    kind = name.rpartition(".")[2]
    return Response(_read(package, name), headers=_HEADERS, media_type=f"{_TYPES[kind]}; charset=utf-8")


@cache
def _read(package: str, name: str) -> bytes:
    return files(package).joinpath(*name.split("/")).read_bytes()
