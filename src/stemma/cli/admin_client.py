"""The administration of a running server, as commands ask it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
import typer

from stemma.errors import StorageError
from stemma.http import http_client
from stemma.terminal_text import visible_json, visible_lines

AdminKey = Annotated[str | None, typer.Option(envvar="STEMMA_ADMIN_KEY", help="Its admin key.")]
DEFAULT_URL = "http://127.0.0.1:8000"
_LOOK_TIMEOUT_S, _WORK_TIMEOUT_S = 60.0, 600.0


def ask(url: str, method: str, path: str, admin_key: str | None, **request: Any) -> dict[str, Any]:
    """Return the JSON object that the server at `url` answers with, safe to show; `request` is httpx's.

    Raises StorageError, with the server's own message, if it doesn't answer or refuses.
    """
    with answer(url, method, path, admin_key, **request) as response:
        return dict(visible_json(json.loads(response.read())))


@contextmanager
def answer(
    url: str, method: str, path: str, admin_key: str | None, **request: Any
) -> Iterator[httpx.Response]:
    """Do the same for an answer of any type, whose content isn't read yet."""
    headers = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
    timeout_s = _LOOK_TIMEOUT_S if method == "GET" else _WORK_TIMEOUT_S
    try:
        with (
            http_client(headers=headers, timeout=timeout_s) as client,
            client.stream(method, f"{url.rstrip('/')}{path}", **request) as response,
        ):
            if response.status_code != 200:
                raise StorageError(f"{url}: {_message(response.read(), response.status_code)}")
            yield response
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise StorageError(f"{url}: {error}") from error


def _message(content: bytes, status: int) -> str:
    try:
        return visible_lines(str(json.loads(content)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"
