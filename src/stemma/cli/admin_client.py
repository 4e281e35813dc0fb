"""Questions to the administration of a running server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from stemma.errors import StorageError
from stemma.http import http_client

_TIMEOUT_S = 60.0


def admin_get(url: str, path: str, params: Mapping[str, str], admin_key: str | None) -> dict[str, Any]:
    """Return the JSON object at `path` of the server at `url`.

    Raises StorageError, with the server's own message, if it doesn't answer or refuses.
    """
    headers = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
    try:
        with http_client(headers=headers, timeout=_TIMEOUT_S) as client:
            response = client.get(f"{url.rstrip('/')}{path}", params=dict(params))
        found = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise StorageError(f"{url}: {error}") from error
    if response.status_code != 200:
        try:
            message = str(found["error"]["message"])
        except (KeyError, TypeError):
            message = f"the server answered with status {response.status_code}"
        raise StorageError(f"{url}: {message}")
    return dict(found)
